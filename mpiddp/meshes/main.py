"""`mpiddp mesh`: the groups of a hybrid-parallel job, and what its links carry, without the cluster.

    mpiddp mesh --hosts 64 --gpus 8 dp=32 tp=8 pp=2
    mpiddp mesh -H node1:4,node2:2 tp=2 --params 1e9

It starts nothing and needs no torch. `mpiddp.mesh(dp=32, tp=8, pp=2)` makes the same groups in a script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import replace

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import UserError
from mpiddp.hosts.allocations import find_allocation
from mpiddp.hosts.hostfile import MAX_SLOTS, Hosts, parse_host_list, read_hostfile, slots_of
from mpiddp.meshes import report
from mpiddp.meshes.dimensions import DIMENSIONS, parse_sizes, resolve
from mpiddp.meshes.layout import Layout
from mpiddp.meshes.traffic import VALUE_BYTES, Training, traffic
from mpiddp.text import shown

_GPUS = 8  # per host of --hosts
_MAGNITUDES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def main(argv: list[str]) -> int:
    """Run `mpiddp mesh ARGV`.

    Raises:
        UserError: bad usage, or sizes that do not fit the hosts.
    """
    options = parse_options(argv)
    training = _training(options)
    hosts = _hosts(options)
    across = options.tp_across_hosts
    sizes = resolve(
        parse_sizes(options.sizes), hosts, tp_across_hosts=across, layers=training.layers
    )
    layout = Layout(sizes, tuple(hosts))
    sent = traffic(layout, training) if training.params or training.has_activations else []
    if options.json:
        print(json.dumps(report.record(layout, sent)))
    else:
        print(report.text(layout, sent, training, all_groups=options.all))
    return 0


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of `mpiddp mesh`. Raises UserError for those that argparse refuses."""
    names = "; ".join(f"{name}: {purpose}" for name, purpose in reversed(DIMENSIONS.items()))
    parser = OneSentenceParser(
        prog="mpiddp mesh",
        usage="%(prog)s [--hosts N --gpus K | -H H1:8,H2:8 | --hostfile FILE] [options] [dp=N tp=N pp=N]",
        description="Print the groups of a hybrid-parallel job on these hosts, and what one step sends over "
        "each link. Starts nothing.",
        epilog=f"Dimensions, fastest first. {names}. One of them may be -1; dp, if it is left out, takes "
        "what the others leave. Example: mpiddp mesh --hosts 64 --gpus 8 dp=32 tp=8 pp=2",
        allow_abbrev=False,
    )
    parser.add_argument("sizes", nargs="*", metavar="dp=N", help="the size of a dimension")
    _add_hosts(parser)
    _add_training(parser)
    add = parser.add_argument_group("output")
    add.add_argument("--all", action="store_true", help="print every host and every group")
    add.add_argument("--json", action="store_true", help="print one line of JSON, with every group")
    for argument in argv:  # as many frameworks spell them
        option, _, size = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and option in DIMENSIONS:
            raise UserError(
                f"{shown(argument)}: write it without dashes: {option}={shown(size) or 'N'}"
            )
    return parser.parse_intermixed_args(argv)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("where (default: the scheduler's allocation)")
    either = add.add_mutually_exclusive_group()
    either.add_argument("--hosts", type=whole(1), metavar="N", help="number of equal hosts")
    either.add_argument(
        "-H", dest="host_list", metavar="H1:2,H2:4", help="hosts and slots on the command line"
    )
    either.add_argument(
        "--hostfile", metavar="FILE", help="file of hosts and slots, one host per line"
    )
    add.add_argument(
        "--gpus",
        type=whole(1),
        metavar="K",
        help=f"GPUs of each host of --hosts (default: {_GPUS}), or of hosts without a slot count",
    )
    add.add_argument(
        "--tp-across-hosts",
        action="store_true",
        help="let groups of tp span hosts, as where NVLink connects several",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the traffic of one step (default: not estimated)")
    add.add_argument(
        "--params",
        type=_amount,
        default=0.0,
        metavar="P",
        help="parameters of the model: 7e9, 7B, 350M",
    )
    add.add_argument(
        "--dtype", choices=list(VALUE_BYTES), default="bf16", help="what is sent (default: bf16)"
    )
    for name, purpose in (
        ("layers", "layers of the model"),
        ("hidden", "values of a token between two layers"),
        ("seq", "tokens of a sample"),
    ):
        add.add_argument(f"--{name}", type=whole(1), default=0, metavar="N", help=purpose)
    add.add_argument(
        "--micro-batch",
        type=whole(1),
        default=1,
        metavar="N",
        help="samples of a micro-batch (default: 1)",
    )
    add.add_argument(
        "--micro-batches",
        type=whole(1),
        default=1,
        metavar="N",
        help="micro-batches of a replica in one step (default: 1)",
    )
    add.add_argument(
        "--fsdp", action="store_true", help="dp shards the parameters (FSDP), as dp_shard does"
    )


def _amount(text: str) -> float:
    """A parser for 7e9, 7000000000, 7B, 350M, 1.5T."""
    match = re.fullmatch(
        r"([0-9]{1,16}(?:\.[0-9]{1,16})?)(?:e\+?([0-9]{1,2})|([KMBT]?))",
        text,
        re.ASCII | re.IGNORECASE,
    )
    amount = 0.0
    if match:
        amount = (
            float(match[1]) * 10.0 ** int(match[2] or 0) * _MAGNITUDES[(match[3] or "").upper()]
        )
    if not 1 <= amount <= 1e18:
        raise argparse.ArgumentTypeError(
            f"expected a number of parameters such as 7e9, 7B or 350M, not {shown(text)!r}"
        )
    return amount


def _training(options: argparse.Namespace) -> Training:
    given = [name for name in ("layers", "hidden", "seq") if getattr(options, name)]
    missing = [name for name in ("layers", "hidden", "seq") if name not in given]
    if given and missing:
        raise UserError(
            f"--{given[0]} is given without {' and '.join(f'--{name}' for name in missing)}. The activations "
            "have a size only with all three."
        )
    return Training(
        params=options.params,
        value_bytes=VALUE_BYTES[options.dtype],
        layers=options.layers,
        hidden=options.hidden,
        seq=options.seq,
        micro_batch=options.micro_batch,
        micro_batches=options.micro_batches,
        fsdp=options.fsdp,
    )


def _hosts(options: argparse.Namespace) -> list[str]:
    """The host of every rank, in the order in which `mpiddp launch` numbers them."""
    if options.hosts is not None:
        gpus = options.gpus or _GPUS
        if options.hosts * gpus > MAX_SLOTS:
            raise UserError(
                f"--hosts {options.hosts} with {gpus} GPUs each are {options.hosts * gpus} GPUs; "
                f"expected at most {MAX_SLOTS}."
            )
        return [f"host{index}" for index in range(options.hosts) for _ in range(gpus)]
    named = _with_slots(_named(options), options.gpus)
    return [host.name for host in named.hosts for _ in range(slots_of(named, host))]


def _named(options: argparse.Namespace) -> Hosts:
    """The hosts by name. Nothing starts there, so names that Open MPI would confuse do no harm."""
    if options.host_list is not None:
        return parse_host_list(options.host_list)
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    granted = find_allocation(os.environ)
    if granted is None:
        raise UserError(
            "mpiddp mesh: on which hosts? Example: mpiddp mesh --hosts 64 --gpus 8 tp=8"
        )
    return granted


def _with_slots(hosts: Hosts, gpus: int | None) -> Hosts:
    """The hosts, with `gpus` slots where the list has no count."""
    if gpus is not None and not hosts.without_slots:
        raise UserError(
            f"--gpus {gpus} is for hosts without a slot count, and each host of {hosts.source} "
            "has one."
        )
    if gpus is None and hosts.without_slots:
        host = hosts.without_slots[0]
        raise UserError(
            f"{hosts.where(host)}: {host.name} has no slot count. Write one, as in {host.name}:8, or give "
            "--gpus 8 for all such hosts."
        )
    filled = (replace(host, slots=gpus) if host.slots is None else host for host in hosts.hosts)
    return replace(hosts, hosts=tuple(filled))

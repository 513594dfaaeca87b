"""`mpiddp mesh`: the groups of a hybrid-parallel job, and what its links carry, without the cluster.

    mpiddp mesh --hosts 64 --gpus 8 dp=32 tp=8 pp=2
    mpiddp mesh -H node1:4,node2:2 tp=2 --params 1e9

It starts nothing and needs no torch. `mpiddp.mesh(dp=32, tp=8, pp=2)` makes the same groups in a script.
"""

from __future__ import annotations

import argparse
import os

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import UserError
from mpiddp.hosts.allocations import find_allocation
from mpiddp.hosts.hostfile import parse_host_list, read_hostfile, slots_of
from mpiddp.meshes import report
from mpiddp.meshes.dimensions import DIMENSIONS, parse_sizes, resolve
from mpiddp.meshes.layout import Layout
from mpiddp.meshes.traffic import VALUE_BYTES, Training, traffic
from mpiddp.text import shown

_MAGNITUDES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def main(argv: list[str]) -> int:
    """Run `mpiddp mesh ARGV`.

    Raises:
        UserError: bad usage, or sizes that do not fit the hosts.
    """
    options = parse_options(argv)
    training, hosts = _training(options), _hosts(options)
    requested, across = parse_sizes(options.sizes), options.tp_across_hosts
    sizes = resolve(requested, hosts, tp_across_hosts=across, layers=training.layers)
    layout = Layout(sizes, tuple(hosts))
    sent = traffic(layout, training)
    print(report.text(layout, sent, training))
    return 0


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The options of `mpiddp mesh`. Raises UserError for those that argparse refuses."""
    names = "; ".join(f"{name}: {purpose}" for name, purpose in reversed(DIMENSIONS.items()))
    parser = OneSentenceParser(
        prog="mpiddp mesh",
        usage="%(prog)s [--hosts N --gpus K | -H H1:8,H2:8 | --hostfile FILE] [options] [dp=N tp=N pp=N]",
        description="Print the groups of a hybrid-parallel job on these hosts, and what one step sends over "
        "each link. Starts nothing.",
        epilog=f"Dimensions, fastest first. {names}. One of them may be -1: all remaining ranks. "
        "Without one, dp takes them. Example: mpiddp mesh --hosts 64 --gpus 8 dp=32 tp=8 pp=2",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("sizes", nargs="*", metavar="dp=N", help="the size of a dimension")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", type=whole(1), metavar="N", help="number of equal hosts")
    slots = "hosts and slots (default: the scheduler's allocation)"
    where.add_argument("-H", dest="host_list", metavar="H1:2,H2:4", help=slots)
    where.add_argument("--hostfile", metavar="FILE", help="file of hosts and slots")
    gpus = "GPUs of each host of --hosts (default: 8)"
    add("--gpus", type=whole(1), default=8, metavar="K", help=gpus)
    across = "let groups of tp span hosts, as where NVLink connects several"
    add("--tp-across-hosts", action="store_true", help=across)
    params = "parameters of the model: 7e9, 7B, 350M (default: 0)"
    add("--params", type=_amount, default=0.0, metavar="P", help=params)
    sent = "what is sent (default: bf16)"
    add("--dtype", choices=list(VALUE_BYTES), default="bf16", help=sent)
    for name, default, purpose in (
        ("layers", 0, "layers of the model"),
        ("hidden", 0, "values of a token between two layers"),
        ("seq", 0, "tokens of a sample"),
        ("micro-batch", 1, "samples of a micro-batch"),
        ("micro-batches", 1, "micro-batches of a replica in one step"),
    ):
        purpose += f" (default: {default})"
        add(f"--{name}", type=whole(1), default=default, metavar="N", help=purpose)
    return parser.parse_intermixed_args(argv)


def _amount(text: str) -> float:
    """A parser for 7e9, 7000000000, 7B, 350M, 1.5T."""
    factor = _MAGNITUDES.get(text[-1:].upper())
    try:
        amount = float(text[:-1] if factor else text) * (factor or 1.0)
    except ValueError:
        amount = 0.0
    if not 1 <= amount <= 1e18:
        raise argparse.ArgumentTypeError(
            f"expected a number of parameters such as 7e9, 7B or 350M, not {shown(text)!r}"
        )
    return amount


def _training(options: argparse.Namespace) -> Training:
    """--layers alone limits the stages; --hidden and --seq need each other and it."""
    if (options.hidden or options.seq) and not (options.layers and options.hidden and options.seq):
        raise UserError("--layers, --hidden and --seq together give the size of the activations.")
    names = ("params", "layers", "hidden", "seq", "micro_batch", "micro_batches")
    given = {name: getattr(options, name) for name in names}
    return Training(value_bytes=VALUE_BYTES[options.dtype], **given)


def _hosts(options: argparse.Namespace) -> list[str]:
    """The host of every rank, in the order in which `mpiddp launch` numbers them."""
    if options.hosts is not None:
        return [f"host{index}" for index in range(options.hosts) for _ in range(options.gpus)]
    if options.host_list is not None:
        named = parse_host_list(options.host_list)
    elif options.hostfile is not None:
        named = read_hostfile(options.hostfile)
    elif granted := find_allocation(os.environ):
        named = granted
    else:
        raise UserError(
            "mpiddp mesh: on which hosts? Example: mpiddp mesh --hosts 64 --gpus 8 tp=8"
        )
    return [host.name for host in named.hosts for _ in range(slots_of(named, host))]

"""The environment variables of the ranks, and who wins if two sources set the same one.

As under torchrun, a rank has every variable of its launcher, except those that a login, a host, or the
scheduler of this job sets, and those that its mpirun has set for the rank. On several hosts they travel over
ssh (`mpiddp.hosts.private`), so that no command line shows a value.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mpiddp.errors import UserError, named_by
from mpiddp.hosts.allocations import SCHEDULERS
from mpiddp.hosts.gpus import for_numbers, hides_all_gpus, is_of_one_host
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host
from mpiddp.hosts.transport import Transport
from mpiddp.protocol.variables import JOB, OF_A_HOST, PRIVATE

LEFT_OUT = "…"  # stands for a value that is never printed

# Settings of an MPI, which its mpirun may read.
_OF_AN_MPI = re.compile("(OMPI|OPAL|ORTE|PRTE|PMIX|HYDRA|I_MPI|MPICH|MPIR|MPIEXEC|MV2)_")
_OF_A_JOB = re.compile(f"({'|'.join(row.ids for row in SCHEDULERS)})$")
# An agent's Python may need these variables before it can read the others.
_TO_START = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", JOB, PRIVATE)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST = 131_071  # bytes of NAME=VALUE that Linux passes to a program
_MAX_BYTES = 1 << 20


class Environment(NamedTuple):
    """The variables of a job by their sources, of which a later one wins over an earlier one.

    On another host, each of them wins over what the host itself sets.
    """

    shell: Mapping[str, str] = MappingProxyType({})  # of the user, which mpirun inherits
    chosen: Mapping[str, str] = MappingProxyType(
        {}
    )  # by -x of a hostfile, then --env-file, then -x
    ours: Mapping[str, str] = MappingProxyType({})  # of this launcher

    @classmethod
    def of(cls, env: Mapping[str, str], settings: Mapping[str, str | None]) -> Environment:
        """The environment of the ranks of a launcher whose variables are `env`. None keeps a variable home."""
        chosen = {name: value for name, value in settings.items() if value is not None}
        return cls(
            {name: value for name, value in env.items() if settings.get(name, "") is not None},
            chosen,
        )

    @property
    def of_ranks(self) -> dict[str, str]:
        """The variables of every rank.

        Numbers of GPUs of this host mean nothing on another; the ranks of this one get them in MPIDDP_GPUS.
        """
        places = [OF_A_HOST, *_of_schedulers(self.shell)]
        forwarded = {
            name: value
            for name, value in self.shell.items()
            if (_OF_A_JOB.match(name) or not any(place.match(name) for place in places))
            and not is_of_one_host(name, value)
        }
        return {**forwarded, **self.chosen, **self.ours}

    def on(self, host: Host) -> dict[str, str]:
        """The variables of the ranks on this host."""
        return {**self.shell, **self.of_ranks} if is_this_host(host.name) else self.of_ranks


def _of_schedulers(env: Mapping[str, str]) -> list[re.Pattern[str]]:
    """The variables of the schedulers that are present. Without Flux, FLUX_DEV is a user's variable."""
    return [re.compile(row.sets) for row in SCHEDULERS if row.is_present(env)]


def to_start(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that mpirun passes to an agent, because it needs them before it can read the others."""
    return {name: variables[name] for name in _TO_START if name in variables}


def of_mpirun(env: Mapping[str, str], transport: Transport) -> dict[str, str]:
    """The few variables that an mpirun needs to start ranks on several hosts.

    Hydra sends its whole environment to the hosts in clear text, and the ranks on mpirun's own host inherit
    it under any MPI. If a scheduler's program reaches the hosts, it needs the scheduler's variables.
    """
    needed = [OF_A_HOST, _OF_AN_MPI, *([] if transport.is_ssh else _of_schedulers(env))]
    return {
        name: value
        for name, value in env.items()
        if name in _TO_START or any(place.match(name) for place in needed)
    }


# --- the variables that the user names ---


def parse_exports(exports: Sequence[str], env: Mapping[str, str]) -> dict[str, str | None]:
    """The settings of `-x VAR`, with its value in `env`, of `-x VAR=VALUE`, and None for `-x VAR-`."""
    settings = dict[str, str | None]()
    for text in exports:
        name, has_value, value = text.partition("=")
        if not _NAME.fullmatch(name if has_value else name.removesuffix("-")):
            shown = f"{name}={LEFT_OUT}" if has_value else name
            raise UserError(
                f'-x {shown}: "{name}" is not a valid variable name.', fix="for example: -x DEBUG=1"
            )
        if not has_value and name.endswith("-"):
            settings[name[:-1]] = None
            continue
        settings[name] = _checked("-x", name, value if has_value else env.get(name))
    return settings


def read_env_file(path: str, env: Mapping[str, str]) -> dict[str, str]:
    with named_by("--env-file"), Path(path).open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise UserError(f"--env-file {path}: larger than 1 MiB: not a file of variables.")
    return dict(parse_env_file(data, path, env))


def parse_env_file(data: bytes, source: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables in a file's bytes: lines NAME=VALUE, NAME for the value in `env`, and # comments.

    A value is taken as it is, without the quotes around all of it. No error shows a part of one.
    """
    for number, line in enumerate(data.decode("utf-8-sig", "replace").split("\n"), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, has_value, value = text.removeprefix("export ").partition("=")
        if not _NAME.fullmatch(name) or "\ufffd" in value:
            raise UserError(
                f"{source}:{number}: expected NAME=VALUE, a name alone, or a # comment."
            )
        if value[:1] in ("'", '"') and len(value) > 1 and value[0] == value[-1]:
            value = value[1:-1]
        yield name, _checked(f"{source}:{number}", name, value if has_value else env.get(name))


def _checked(where: str, name: str, value: str | None) -> str:
    """The value, if there is one, and a program can have it in its environment."""
    if value is None:
        raise UserError(f"{where}: {name} is not set here.", fix=f"export {name}=…")
    if "\0" in value:
        raise UserError(f"{where}: the value of {name} contains a zero byte.")
    size = len(os.fsencode(f"{name}={value}"))
    if size > _LONGEST:
        raise UserError(
            f"{where}: {name} and its value have {size:,} bytes, and Linux passes at most {_LONGEST:,} to a program.",
            fix="write the value into a file, and pass the path of the file",
        )
    return value


def without_values(arguments: Iterable[str], exports: Iterable[str]) -> list[str]:
    """Options that are safe to print: `VAR=…` for each -x VAR=VALUE of `exports`."""
    words = [*arguments]
    for text in (text for text in exports if "=" in text):
        safe = f"{text.partition('=')[0]}={LEFT_OUT}"
        words = [word.removesuffix(text) + safe if word.endswith(text) else word for word in words]
    return words


# --- the GPUs of each host ---


def gpu_table(hosts: Sequence[Host], environment: Environment) -> str:
    """MPIDDP_GPUS: the variables that the ranks of each host set before they load torch; "" for none.

    If the user hides all GPUs of a job, the numbers in its hostfile are ignored, because nobody has checked them.
    """
    env = environment.shell
    names = sorted(env.keys() - environment.chosen.keys())
    here = {name: env[name] for name in names if is_of_one_host(name, env[name])}

    def choice(host: Host) -> dict[str, str]:
        if host.gpus is not None and not hides_all_gpus(env):
            return for_numbers(host.gpus, env)
        return here if is_this_host(host.name) else {}

    choices = [*map(choice, hosts)]
    return json.dumps(choices, separators=(",", ":")) if any(choices) else ""

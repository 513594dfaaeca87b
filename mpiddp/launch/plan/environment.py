"""The environment variables of the ranks: an allow-list, those that the user names, and the launcher's own.

Variables are passed by name, so that no value is on a command line, where every user of a host can read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mpiddp.errors import UserError, named_by
from mpiddp.hosts.gpus import for_numbers, hides_all_gpus, is_of_one_host
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host
from mpiddp.launch.plan.command import LEFT_OUT, Request
from mpiddp.protocol.variables import SECRET

# Those that reach the ranks of every job. Rank 0 uses the address, and it may run on another host than the
# launcher; the ids of schedulers are for names of runs; the paths of this Python are left out.
_KNOWN = re.compile(
    "(PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|MPI4PY_LIBMPI|MASTER_ADDR|MASTER_PORT)$"
    "|(SLURM_JOB_ID|SLURM_JOB_NAME|PBS_JOBID|LSB_JOBID|JOB_ID)$"
    "|(NCCL|GLOO|RCCL|UCX|FI|OMP|KMP|MKL|HF|MPIDDP|MLFLOW|TRACKIO|WANDB|PYTORCH|CUDA|CUBLAS|CUDNN|HIP|ROCR|ZE|ONEAPI)_"
    "|TORCH|PYTHON(?!(HOME|EXECUTABLE|PLATLIBDIR|STARTUP)$)"
)
# Those that a login sets on each host by itself.
_OF_A_HOST = re.compile(
    "(HOME|USER|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|TERM|TMPDIR|HOSTNAME|DISPLAY|KRB5CCNAME|TZ|_)$"
    "|LANG|LC_|SSH_|XDG_|DBUS_"
)
# The user's settings of an MPI, which it passes on, and what a scheduler sets on each host.
_OF_AN_MPI = re.compile("(OMPI|OPAL|ORTE|PRTE|PMIX|HYDRA|I_MPI|MPICH|MPIR|MPIEXEC|MV2)_")
_OF_A_SCHEDULER = re.compile(
    "(SLURM|PBS|LSB|LSF|LS|EGO|SGE|JOB|TASK)_|PE|N(SLOTS|HOSTS|QUEUES)|QUEUE|ARC|RESTARTED|REQUEST"
)

# A variable with such a word in its name is passed only if -x or a file of variables names it: it may be a
# password.
SECRET_WORDS = ("TOKEN", "SECRET", "KEY", "PASS", "CREDENTIAL", "AUTH", "COOKIE", "SESSION", "DSN")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_BYTES = 1 << 20


def forwarded(env: Mapping[str, str], *, env_all: bool = False) -> dict[str, str]:
    """The variables of `env` that every job gets, sorted by name; with --env-all, all but secrets.

    Numbers of GPUs of this host mean nothing on another; the ranks of this one get them in MPIDDP_GPUS.
    """
    of_no_job = (_OF_A_HOST, _OF_AN_MPI, _OF_A_SCHEDULER)

    def is_free(name: str) -> bool:
        is_name = _NAME.fullmatch(name) and not is_secret(name)
        is_ours = name.startswith("PYTHON") or any(each.match(name) for each in of_no_job)
        return bool(is_name) and not is_ours

    chosen = [name for name in sorted(env) if is_known(name) or (env_all and is_free(name))]
    return {name: env[name] for name in chosen if not is_of_one_host(name, env[name])}


def is_known(name: str) -> bool:
    """Whether a variable of this name reaches the ranks of every job."""
    return bool(_KNOWN.match(name)) and not is_secret(name)


def told(env: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Which variables of this shell the ranks of several hosts get, and which they do not: two sentences."""
    got = ", ".join(sorted(given.keys() & env.keys())) or "no variable"
    others = [name for name in sorted(env) if name not in given and not _OF_A_HOST.match(name)]
    hint = "-x NAME passes one, --env-all all but secrets."
    return [
        f"of this shell, the ranks get {got}.",
        *([f"they do not get {', '.join(others)}. {hint}"] if others else []),
    ]


def is_secret(name: str) -> bool:
    is_partition = name.upper().endswith("_PKEY")  # of InfiniBand: NCCL_IB_PKEY
    return any(word in name.upper() for word in SECRET_WORDS) and not is_partition


# --- that the user names ---


def parse_exports(exports: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables of the options `-x VAR`, whose value is that in `env`, and `-x VAR=VALUE`."""
    variables = {}
    for export in exports:
        name, has_value, value = export.partition("=")
        if not _NAME.fullmatch(name):
            shown = f"{name}={LEFT_OUT}" if has_value else name
            raise UserError(
                f'-x {shown}: "{name}" is not a valid variable name. Example: -x DEBUG=1'
            )
        if not has_value and name not in env:
            raise UserError(f"-x {name}: {name} is not set here. Set it first: export {name}=…")
        variables[name] = value if has_value else env[name]
    return variables


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
        if not _NAME.fullmatch(name) or "\0" in value or "\ufffd" in value:
            raise UserError(
                f"{source}:{number}: expected NAME=VALUE, a name alone, or a # comment."
            )
        if not has_value and name not in env:
            raise UserError(f"{source}:{number}: {name} is not set here. Write: {name}=VALUE")
        if value[:1] in ("'", '"') and len(value) > 1 and value[0] == value[-1]:
            value = value[1:-1]
        yield name, value if has_value else env[name]


def without_values(arguments: Iterable[str], exports: Iterable[str]) -> list[str]:
    """Options that are safe to print: `VAR=…` for each -x VAR=VALUE of `exports`."""
    shown = {each: f"{each.partition('=')[0]}={LEFT_OUT}" for each in exports if "=" in each}
    for export in shown:
        arguments = [
            each.removesuffix(export) + shown[export] if each.endswith(export) else each
            for each in arguments
        ]
    return [*arguments]


def take_private(variables: dict[str, str], exports: Iterable[str]) -> dict[str, str]:
    """Take out what mpirun must not send in clear text: the job's key, and what only the user names."""
    names = [SECRET, *(name for name in exports if not is_known(name))]
    return {name: variables.pop(name) for name in names}


def of_mpirun(env: Mapping[str, str], kept: Collection[str]) -> dict[str, str]:
    """The environment of mpirun without secrets, and what is `kept`: Hydra sends all of it to its proxies.

    An ssh with a ProxyCommand may need any other.
    """

    def is_needed(name: str) -> bool:
        return bool(_OF_A_HOST.match(name) or _OF_AN_MPI.match(name))

    left = {name for name in env if name in kept or is_secret(name)}
    return {name: env[name] for name in env if name not in left or is_needed(name)}


def left_out(request: Request) -> list[str]:
    """The names that ranks beside the launcher inherit from its shell, and no rank of another host has."""
    of_others = [_OF_A_HOST, _OF_AN_MPI]
    of_others += [] if request.hosts.transport.is_ssh else [_OF_A_SCHEDULER]
    inherited = request.env.keys() - request.variables.keys()
    return [name for name in inherited if not any(each.match(name) for each in of_others)]


# --- the GPUs of each host ---


def of_host(host: Host, env: Mapping[str, str], exports: Mapping[str, str]) -> dict[str, str]:
    """What the ranks of a host have of `env`, which is this machine's, and of -x."""
    return {**(env if is_this_host(host.name) else forwarded(env)), **exports}


def gpu_table(hosts: Sequence[Host], env: Mapping[str, str], exports: Mapping[str, str]) -> str:
    """MPIDDP_GPUS: what the ranks of each host set before they load torch; "" for nothing.

    Numbers of the hostfile do not count in a job whose user hides all GPUs, and nobody has checked them.
    """
    left = {name: value for name, value in env.items() if name not in exports}
    here = {name: value for name, value in left.items() if is_of_one_host(name, value)}

    def choice(host: Host) -> dict[str, str]:
        if host.gpus is not None and not hides_all_gpus(env):
            return for_numbers(host.gpus, env)
        return here if is_this_host(host.name) else {}

    choices = [*map(choice, hosts)]
    return json.dumps(choices, separators=(",", ":")) if any(choices) else ""

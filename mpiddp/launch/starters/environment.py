"""The environment variables that the ranks get: an allow-list, never the whole environment.

Variables are passed by name, so that no value is on a command line, where every user of a host can read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from mpiddp.errors import UserError

ALLOWED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "NCCL_*",
    "TORCH_*",
    "PYTORCH_*",
    "GLOO_*",
    "OMP_*",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "UCX_*",
    "FI_*",
    "HF_*",
    "MPIDDP_*",
    "MPI4PY_LIBMPI",
    # Rank 0 uses these two, and it may run on another host than the launcher.
    "MASTER_ADDR",
    "MASTER_PORT",
)

# A variable with such a name is passed only if -x names it: it may be a password.
SECRET = ("*TOKEN*", "*SECRET*", "*KEY*", "*PASSWORD*", "*PASSWD*", "*CREDENTIAL*")


def is_secret(name: str) -> bool:
    return _matches(name.upper(), SECRET)


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command that is safe to print: `-x TOKEN=VALUE` becomes `-x TOKEN`."""
    shown = list(arguments)
    for index, argument in enumerate(arguments):
        is_value = index > 0 and arguments[index - 1] == "-x"
        found = (each for each in ("-x=", "-x") if argument.startswith(each))
        option = "" if is_value else next(found, None)
        if option is not None:
            name, has_value, _ = argument.removeprefix(option).partition("=")
            if has_value and is_secret(name):
                shown[index] = option + name
    return shown


def parse_exports(exports: Iterable[str], env: Mapping[str, str]) -> dict[str, str | None]:
    """The variables of the options `-x VAR` (None: its value here) and `-x VAR=VALUE`.

    Raises:
        UserError: an invalid variable name, or a variable without a value that is not set here.
    """
    variables: dict[str, str | None] = {}
    for export in exports:
        name, has_value, value = export.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(
                f'-x {export}: "{name}" is not a valid variable name. Example: -x DEBUG=1'
            )
        if not has_value and name not in env:
            raise UserError(f"-x {name}: {name} is not set here. Write: -x {name}=VALUE")
        variables[name] = value if has_value else None
    return variables


def forwarded(env: Mapping[str, str], exports: Iterable[str] = ()) -> tuple[str, ...]:
    """The sorted names of the variables for the ranks: `exports`, and the allowed ones of `env`."""
    allowed = {name for name in env if _matches(name, ALLOWED) and not is_secret(name)}
    return tuple(sorted(allowed.union(exports)))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

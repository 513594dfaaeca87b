"""Which environment variables travel to the ranks: an allow-list, never the whole environment.

Variables go by name, so that no value stands on a command line, where every user of a host can read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from mpiddp.errors import UserError

ALLOWED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "NCCL_*",
    "TORCH_*",
    "GLOO_*",
    "OMP_*",
    "CUDA_VISIBLE_DEVICES",
    "HF_*",
    "MPIDDP_*",
    "MPI4PY_LIBMPI",
)

# A variable with such a name goes only when -x names it: it may well be a password.
SECRET = ("*TOKEN*", "*SECRET*", "*KEY*", "*PASSWORD*", "*PASSWD*", "*CREDENTIAL*")


def is_secret(name: str) -> bool:
    return _matches(name.upper(), SECRET)


def parse_exports(
    exports: Iterable[str], env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The names in the user's `-x VAR` and `-x VAR=VALUE`, and the values of the latter.

    Raises:
        UserError: not a variable's name, or a variable that is not set here and was given no value.
    """
    names: list[str] = []
    values: dict[str, str] = {}
    for export in exports:
        name, has_value, value = export.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(
                f'-x {name}: "{name}" is not the name of an environment variable. Example: -x DEBUG=1'
            )
        if has_value:
            values[name] = value
        elif name not in env:
            raise UserError(f"-x {name}: {name} is not set here. Write: -x {name}=VALUE")
        names.append(name)
    return names, values


def forwarded(env: Mapping[str, str], exports: Iterable[str] = ()) -> list[str]:
    """The sorted names of `env` that go to the ranks: the allowed ones, and those that -x names."""
    allowed = {name for name in env if _matches(name, ALLOWED) and not is_secret(name)}
    return sorted(allowed.union(exports))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

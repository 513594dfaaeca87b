"""The environment variables that the ranks get: an allow-list, never the whole environment.

Variables are passed by name, so that no value is on a command line, where every user of a host can read it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from mpiddp.errors import UserError
from mpiddp.hosts.gpus import is_of_one_host
from mpiddp.text import all_of, escaped

ALLOWED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "MPI4PY_LIBMPI",
    # Rank 0 uses these two, and it may run on another host than the launcher.
    "MASTER_ADDR",
    "MASTER_PORT",
)
ALLOWED_BEGINNINGS = (
    *("NCCL_", "GLOO_", "RCCL_", "UCX_", "FI_"),
    *("TORCH_", "PYTORCH_", "OMP_", "HF_", "MPIDDP_"),
    *("HIP_", "ROCR_", "ZE_", "ONEAPI_"),
)

# A variable with such a word in its name is passed only if -x or a file of variables names it: it may be a
# password.
SECRET_WORDS = ("TOKEN", "SECRET", "KEY", "PASS", "CREDENTIAL", "AUTH", "COOKIE", "SESSION", "DSN")
LEFT_OUT = "…"  # stands for a value in what is printed
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile("-v*x=?")  # also -vx
_SHOWN = re.compile(rf"({_OPTION.pattern})?[A-Za-z_][A-Za-z0-9_]*={LEFT_OUT}")


def is_secret(name: str) -> bool:
    is_partition = name.upper().endswith("_PKEY")  # of InfiniBand: NCCL_IB_PKEY
    return any(word in name.upper() for word in SECRET_WORDS) and not is_partition


def without_value(export: str, env: Mapping[str, str]) -> str:
    """`VAR=…` for `VAR=VALUE`; `VAR`, which passes the same value, if `env` has it."""
    name, has_value, value = export.partition("=")
    return f"{name}={LEFT_OUT}" if has_value and env.get(name) != value else name


def without_values(
    arguments: Sequence[str], exports: Sequence[str], env: Mapping[str, str]
) -> list[str]:
    """Options that are safe to print: no value of an `-x VAR=VALUE`, whatever the variable's name.

    Args:
        exports: the VAR=VALUE of `arguments`, as the parser has found them.
        env: the variables of whoever pastes the printed command.
    """
    shown = list(arguments)
    for index, argument in enumerate(arguments):
        is_value = index > 0 and re.fullmatch("-v*x", arguments[index - 1])
        found = _OPTION.match(argument)
        option = "" if is_value or not found else found[0]
        if (is_value or found) and argument.removeprefix(option) in exports:
            shown[index] = option + without_value(argument.removeprefix(option), env)
    return shown


def shell_line(arguments: Sequence[str]) -> str:
    """The arguments as one line for bash. `VAR=…` has no quotes, and control characters are escaped."""
    return " ".join(map(_quoted, arguments))


def _quoted(argument: str) -> str:
    if _SHOWN.fullmatch(argument):
        return argument
    if escaped(argument) != argument:
        text = argument.replace("\\", "\\\\").replace("'", "\\'")
        return f"$'{escaped(text)}'"
    return shlex.quote(argument)


def fill_in_hint(exports: Iterable[str], env: Mapping[str, str]) -> str:
    """A sentence about the values that a printed command lacks, "" if it has all."""
    shown = {without_value(export, env) for export in exports}
    names = sorted(each.partition("=")[0] for each in shown if each.endswith(f"={LEFT_OUT}"))
    if not names:
        return ""
    return f"{LEFT_OUT} replaces values that are never printed here. Fill in: {', '.join(names)}"


def parse_exports(exports: Sequence[str], env: Mapping[str, str]) -> dict[str, str | None]:
    """The variables of the options `-x VAR` (None: its value here), `-x VAR=VALUE` and `-x 'PREFIX_*'`.

    A pattern passes no variable that may be a secret. A name takes precedence over a pattern, and a later
    name over an earlier one.

    Raises:
        UserError: an invalid variable name, a variable without a value that is not set here, or a
            pattern without a variable.
    """
    patterns = [export for export in exports if _is_pattern(export)]
    variables: dict[str, str | None] = {}
    for pattern in patterns:
        found = _matches_of(pattern, env)
        if not found:
            raise UserError(f"-x {shlex.quote(pattern)}: no variable here has such a name.")
        variables |= dict.fromkeys(name for name in found if not is_secret(name))
    for export in exports:
        if export in patterns:
            continue
        name, has_value, value = export.partition("=")
        shown = without_value(export, {})
        if not _NAME.fullmatch(name):
            raise UserError(
                f'-x {shown}: "{name}" is not a valid variable name. Example: -x DEBUG=1'
            )
        if not has_value and name not in env:
            raise UserError(f"-x {name}: {name} is not set here. Set it first: export {name}=…")
        variables[name] = value if has_value else None
    return variables


def left_out_hint(exports: Sequence[str], env: Mapping[str, str]) -> str:
    """A sentence about the variables that a pattern matches but does not pass, "" if there is none."""
    named = {export.partition("=")[0] for export in exports}
    matched = {name for each in exports if _is_pattern(each) for name in _matches_of(each, env)}
    names = sorted(filter(is_secret, matched - named))
    if not names:
        return ""
    options = " ".join(f"-x {name}" for name in names)
    return f"a pattern passes no secret: {all_of(names)} may be one. To pass it by name: {options}"


def _is_pattern(export: str) -> bool:
    return re.fullmatch("[A-Za-z0-9_]+", re.sub("[*?]", "", export)) is not None and (
        "*" in export or "?" in export
    )


def _matches_of(pattern: str, env: Mapping[str, str]) -> list[str]:
    """The variables that match; the shell's functions, such as BASH_FUNC_f%%, have no valid name."""
    return [name for name in env if fnmatchcase(name, pattern) and _NAME.fullmatch(name)]


def forwarded(env: Mapping[str, str], exports: Iterable[str] = ()) -> dict[str, str]:
    """The variables of `env` for the ranks, sorted by name: those that `exports` names, and the allowed ones.

    Numbers of GPUs of this host mean nothing on another; the ranks of this one get them in MPIDDP_GPUS.
    """
    named = set(exports)
    return {
        name: env[name]
        for name in sorted(env)
        if name in named
        or (_is_allowed(name) and not is_secret(name) and not is_of_one_host(name, env[name]))
    }


def _is_allowed(name: str) -> bool:
    return name in ALLOWED or name.startswith(ALLOWED_BEGINNINGS)

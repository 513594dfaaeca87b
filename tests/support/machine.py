"""Ports of this machine, and programs that a test puts in the place of real ones."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

# An idle H100 with driver 580, in the form in which nvidia-smi answers the query of `mpiddp.hosts.gpus`.
# Sources: "nvidia-smi --help-query-gpu"; docs/evidence/gpu.md for the driver and the memory.
GPU_ROW = {
    "name": "NVIDIA H100 80GB HBM3",
    "pci.bus_id": "00000000:18:00.0",
    "uuid": "GPU-18ac0f2e-6c1b-0d4f-5b2a-0c9d6a6f6a00",
    "utilization.gpu": "0",
    "memory.used": "0",
    "memory.total": "81559",
    "temperature.gpu": "31",
    "clocks_event_reasons.active": "0x0000000000000001",
    "ecc.errors.uncorrected.volatile.total": "0",
    "driver_version": "580.159.04",
    "gpu_recovery_action": "None",
}
SECOND_GPU = {"pci.bus_id": "00000000:9A:00.0", "uuid": "GPU-9aac0f2e-6c1b-0d4f-5b2a-0c9d6a6f6a01"}


def nvidia_smi(*gpus: Mapping[str, str | None], users: str = "") -> str:
    """The text of an nvidia-smi that prints these GPUs and their users. A GPU has its differences to GPU_ROW.

    It refuses a field that it does not have (None), as another version does.
    """
    values = "\n".join(
        f"{number}:{field}) value='{value}' ;;"
        for number, gpu in enumerate(gpus)
        for field, value in {**GPU_ROW, **gpu}.items()
        if value is not None
    )
    return f"""
case "$1" in
--query-gpu=*)
    IFS=,
    for number in {" ".join(map(str, range(len(gpus))))}; do
        row=
        for field in ${{1#*=}}; do
            case "$number:$field" in
            {values}
            *) echo "Field \\"$field\\" is not a valid field to query."; exit 2 ;;
            esac
            row="$row, $value"
        done
        echo "${{row#, }}"
    done
    unset IFS
    ;;
--query-compute-apps=*) cat <<'END'
{users}
END
esac
"""


TWO_GPUS = nvidia_smi({}, SECOND_GPU)


def executable(path: Path, text: str) -> str:
    """Write a program for the shell, or for the interpreter that the text names. Returns its path."""
    path.parent.mkdir(exist_ok=True)
    shell = "" if text.startswith("#!") else "#!/bin/sh\n"
    path.write_text(f"{shell}{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def tool(folder: Path, name: str, text: str) -> str:
    """Write a program with this text. Returns a PATH that has it."""
    executable(folder / name, text)
    return f"{folder}:{os.defpath}"


def reserved(address: str) -> socket.socket:
    """A socket that reserves a port. The kernel never assigns it, but a process may request it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((address, 0))
    return reservation


def python_that_needs(libraries: Path) -> str:
    """This Python with its packages, at a path of its own. As one of a module, it starts with LD_LIBRARY_PATH alone."""
    ours, venv = Path(sys.prefix), libraries.with_name("venv")
    (venv / "bin").mkdir(parents=True)
    for name in ("lib", "pyvenv.cfg"):
        (venv / name).symlink_to(ours / name)
    lacks = "libneeded.so: cannot open shared object file: No such file or directory"
    text = f"""\
case ":$LD_LIBRARY_PATH:" in
  *:'{libraries}':*) ;;
  *) echo "error while loading shared libraries: {lacks}" >&2; exit 127 ;;
esac
exec bash -c 'exec -a "$0" {Path(sys.executable).resolve()} "$@"' "$0" "$@"
"""
    return executable(venv / "bin" / "python", text)

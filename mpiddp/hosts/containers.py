"""The runtimes of containers: the image of --image comes in, and the command of a rank in it goes out.

A rank's container shares the network, the memory and the processes of its host, so ranks meet, signals arrive,
and what a job leaves is found, as without an image. To add a runtime, add a row.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import NamedTuple

from mpiddp.hosts.gpus import hides_all_gpus, tool_output
from mpiddp.protocol.channel import REMOVER_NAME
from mpiddp.protocol.variables import JOB, OF_A_HOST
from mpiddp.text import shown

_NVIDIA, _AMD, _INFINIBAND = "/dev/nvidiactl", "/dev/kfd", "/dev/infiniband"
# Paths of the host. An image has its own programs and packages.
_OF_PROGRAMS = re.compile(
    "(PATH|PYTHONPATH|PYTHONUSERBASE|LD_.*|VIRTUAL_ENV|CONDA_.*|MPI4PY_LIBMPI|CUDA_(HOME|PATH))$"
    "|(SSL_CERT_.*|REQUESTS_CA_BUNDLE|BASH_ENV|MODULEPATH)$"
)
# A copy of an image keeps this, but not always its id.
_FACTS = (
    "image",
    "inspect",
    "--format=image={{.RootFS.Layers}}{{.Config.Env}}{{.Config.Entrypoint}}",
)
_PRESENT = (
    "image="  # begins what tells an image from another one; any other text says why it is missing
)
_ANSWERS_S = 10.0  # for a program to say whether it has an image
# Podman would read an image from a file, or from another store.
_ELSEWHERE = re.compile("(dir|oci|oci-archive|docker-archive|docker-daemon|containers-storage):")
# The process reads a line when the runtime has ended, and none if this process is killed: the container may begin
# later. A launcher that ends its job spares the shell by its name, and may kill the container at the same time.
_REMOVE = """
trap "" HUP INT TERM
printf "$0" >/proc/self/comm
read -r _ || { "$@"; sleep 1; }
"$@" || { sleep 1; "$@"; }
"""


class Container(NamedTuple):
    """The container of a rank."""

    name: str
    folder: str
    mounts: Sequence[str]
    variables: Sequence[str]  # the names of those that it gets from the runtime's process
    has_gpus: bool


class Runtime(NamedTuple):
    """A program that runs containers."""

    run: Callable[[Container], Iterator[str]]  # its arguments before the image
    suffix: str = ""  # of images that are files; "" if it keeps images itself
    remove: Sequence[str] = ()  # its arguments that end a container, which may outlive this program
    enter: Sequence[str] = ()  # the beginning of the command in the container, before its folder


def _oci(container: Container, gpus: str) -> Iterator[str]:
    """The options that Docker and Podman share."""
    yield from ("run", "--rm", "--interactive", "--pull=never", "--security-opt=label=disable")
    yield from ("--network=host", "--ipc=host", "--pid=host")
    yield from (
        f"--name={container.name}",
        f"--user={os.getuid()}:{os.getgid()}",
        f"--workdir={container.folder}",
    )
    yield from (f"--mount=type=bind,source={path},target={path}" for path in container.mounts)
    if os.getuid():  # whose home folder in the image is "/", if it has one
        yield from ("--env=HOME=/tmp", "--env=USER")
    yield from (f"--env={name}" for name in container.variables)
    if container.has_gpus and Path(_NVIDIA).exists():
        yield gpus
    yield from (
        f"--device={path}" for path in (_AMD, "/dev/dri", _INFINIBAND) if Path(path).exists()
    )


def _docker(container: Container) -> Iterator[str]:
    yield from _oci(container, "--gpus=all")
    yield from (f"--group-add={group}" for group in os.getgroups())
    # A container of Podman inherits these.
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    yield f"--ulimit=memlock={limit}:{limit}"
    if len(cores := os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        yield f"--cpuset-cpus={','.join(map(str, cores))}"


def _podman(container: Container) -> Iterator[str]:
    yield from _oci(container, "--device=nvidia.com/gpu=all")
    yield "--detach-keys="  # which stdin may contain
    if os.getuid():
        yield "--userns=keep-id"


def _apptainer(container: Container) -> Iterator[str]:
    yield from (
        "exec",
        f"--pwd={container.folder}",
        *(f"--bind={path}" for path in container.mounts),
    )
    flags = {_NVIDIA: "--nv", _AMD: "--rocm"} if container.has_gpus else {}
    yield from (flag for device, flag in flags.items() if Path(device).exists())


def _enroot(container: Container) -> Iterator[str]:
    yield from ("start", "--rw", *(f"--mount={path}:{path}" for path in container.mounts))
    yield from (f"--env={name}" for name in container.variables)


RUNTIMES: Mapping[str, Runtime] = {
    # https://docs.docker.com/reference/cli/docker/container/run/
    "docker": Runtime(_docker, remove=("rm", "--force")),
    # podman-run(1)
    "podman": Runtime(_podman, remove=("rm", "--force", "--time=0", "--ignore")),
    # https://apptainer.org/docs/user/latest/cli/apptainer_exec.html
    "apptainer": Runtime(_apptainer, ".sif"),
    # https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md
    "enroot": Runtime(_enroot, ".sqsh", enter=("sh", "-c", 'cd "$0" && exec "$@"')),
}


class Image(NamedTuple):
    """An image, and the program that runs it."""

    program: str
    name: str  # or the path of a file

    def __str__(self) -> str:
        return f"{self.program}://{self.name}"

    @classmethod
    def of(cls, text: str) -> Image:
        """The image of `PROGRAM://NAME`, of a file, or of a name that a program of this host has."""
        program, _, name = text.rpartition("://")
        by_suffix = (
            row
            for row, runtime in RUNTIMES.items()
            if runtime.suffix and name.endswith(runtime.suffix)
        )
        program = program or next(by_suffix, "")
        is_name = bool(name) and not name.startswith("-") and not _ELSEWHERE.match(name)
        if program not in ("", *RUNTIMES) or not is_name:
            known = ", ".join(f"{program}://…" for program in RUNTIMES)
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is no image; expected a name, a file, or {known}"
            )
        kept = [row for row, runtime in RUNTIMES.items() if not runtime.suffix]
        installed = tuple(filter(shutil.which, kept)) or tuple(kept)
        program = program or _program_that_has(name, installed)
        return cls(program, os.path.abspath(name) if RUNTIMES[program].suffix else name)  # noqa: PTH100

    @property
    def is_file(self) -> bool:
        return bool(RUNTIMES[self.program].suffix)

    @property
    def facts(self) -> list[str]:
        """The command whose output `identity` reads."""
        return (
            ["stat", "--format=image=%s", self.name]
            if self.is_file
            else [self.program, *_FACTS, self.name]
        )

    def fix(self, *, is_alone: bool = False) -> str:
        """What brings it to a host that has not the same one, or to this host if no other takes part."""
        way = os.path.dirname(self.name) if self.is_file else f"--image {self}"  # noqa: PTH120
        here = "" if self.is_file else f"{self.program} pull {self.name}"
        return here if is_alone else f"mpiddp hosts push HOSTFILE {way}"

    def command(self, container: Container, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` in this container."""
        row = RUNTIMES[self.program]
        inside = [*row.enter, *([container.folder] if row.enter else ()), *argv]
        return [self.program, *row.run(container), self.name, *inside]

    def remover(self, container: str, env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """A process that ends this container after this process, or once it gets a line; None if none is needed."""
        if not (remove := RUNTIMES[self.program].remove):
            return None
        command = ["sh", "-c", _REMOVE, REMOVER_NAME, self.program, *remove, container]
        env = {
            name: value for name, value in env.items() if name != JOB
        }  # by which a sweep would find it
        return subprocess.Popen(
            command, env=env, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
        )


@cache
def _program_that_has(name: str, installed: Sequence[str]) -> str:
    """The program that runs the image on all hosts: the first that has it here, or else that answers.

    Docker's client is often installed without its service.
    """
    if len(installed) == 1:
        return installed[0]
    for program in installed:
        if identity(tool_output(program, (*_FACTS, name), None, _ANSWERS_S) or ""):
            return program
    for program in installed:
        with suppress(OSError, subprocess.TimeoutExpired):
            lists = [program, "image", "ls", "--quiet"]
            if not subprocess.run(
                lists, stdin=DEVNULL, capture_output=True, timeout=_ANSWERS_S
            ).returncode:
                return program
    return installed[0]


def identity(said: str) -> str:
    """The line of the output of `Image.facts` that tells the image from another one; "" if the image is missing."""
    return next((line for line in said.splitlines() if line.startswith(_PRESENT)), "")


def says_missing(said: str) -> bool:
    """Whether the output of `Image.facts` says that there is no such image. Else the program itself has failed."""
    return re.search("(?i)no such|not known|not found", said) is not None


def folder(text: str) -> str:
    """A folder of --mount, which the container has at the same path."""
    if not text.startswith("/") or re.search("[:,]", text):
        raise argparse.ArgumentTypeError(
            f'expected an absolute path without ":" and ",", not {shown(text)!r}'
        )
    return os.path.normpath(text)


def container_of(
    name: str, mounts: Sequence[str], env: Mapping[str, str], exported: Collection[str]
) -> tuple[Container, dict[str, str]]:
    """The container of a rank that has the variables `env`, and the variables of the runtime's process.

    The user has named `exported` with -x.
    """
    theirs = {name: env[name] for name in env if name in exported or not _OF_PROGRAMS.match(name)}
    passed = [name for name in theirs if name in exported or not OF_A_HOST.match(name)]
    here = str(Path.cwd())
    container = Container(
        name, here, [*dict.fromkeys((here, *mounts))], passed, not hides_all_gpus(env)
    )
    return container, {**theirs, "PATH": f"{env.get('PATH', '')}:{os.defpath}"}


def job_in_image(job: Sequence[str]) -> tuple[str, ...]:
    """The command of a job (a script, -m and a module, or -- and a command) in an image."""
    return tuple(job) if job[0] == "--" else ("--", "python3", "-u", *job)

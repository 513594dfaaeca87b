"""`mpiddp.spawn`: run a function in every rank of a job, from Python or a notebook.

The caller starts a launcher (`mpiddp.launch.main`), which starts the ranks (`mpiddp.runtime.function`). The
launcher is a process of its own, because it handles signals, adopts orphans, and writes to the file
descriptors 1 and 2, where a library has no business. In a notebook, sys.stdout is a stream of the cell.

Functions of modules are pickled by name, and the ranks search the caller's sys.path for them. cloudpickle
pickles the functions of `__main__`, of a notebook and of registered modules by value.
"""

from __future__ import annotations

import inspect
import io
import linecache
import os
import pickle
import socket
import subprocess
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import current_process, parent_process
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from mpiddp import errors
from mpiddp.arguments import OURS
from mpiddp.errors import BAD_INPUT, DONE, INTERRUPTED, STOPPED, JobFailed, RankFailed, UserError
from mpiddp.hosts.allocations import in_slurm_terminal
from mpiddp.protocol.channel import encode, messages_over
from mpiddp.protocol.variables import JOB
from mpiddp.runtime.function import named
from mpiddp.runtime.job.stopping import interrupts_end
from mpiddp.world import World, is_joined

Result = TypeVar("Result")
Value: TypeAlias = str | int | float | bool | Sequence[str | int] | None  # the value of an option

_REPEATED = ("--env-file", "--mpi-args")  # the values of other options are joined by commas
_LAST_S = 0.5  # after the end of the launcher, its last lines are read for this time at most


def spawn(
    function: Callable[..., Result],
    *args: Any,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    ranks: int | None = None,
    ranks_per_host: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    **options: Value,
) -> list[Result]:
    """Run `function(*args)` in every rank of a job, and return the results of all ranks: [world_size].

        def train(lr):
            with mpiddp.process_group() as world:
                ...
                return loss.item()

        losses = mpiddp.spawn(train, 0.1, hosts="node1:4,node2:4")

    It does what `mpiddp launch` does for a script: checks the hosts, starts the ranks with one mpirun, shows
    their output with prefixes, and ends all ranks when one fails. In a notebook the output reaches the cell.
    Within the function `mpiddp.init`, `mpiddp.Checkpoints` and the others work as in a script. Ctrl-C, or
    the interruption of a cell, stops the job, and a second one kills it; no process is left behind.

    A function of a module is imported by each rank. cloudpickle, which `./run.sh setup` brings,
    pickles all arguments, lambdas, and functions of `__main__` or a notebook. Modules and packages must be on
    every host, at the caller's paths; `cloudpickle.register_pickle_by_value` sends one of them along.

    Args:
        function: it returns what can be pickled; tensors have to be on the CPU. `sys.exit()` returns None.
        args: its arguments, the same on every rank. `functools.partial` passes arguments by name.
        hosts: hosts with their slots, as `-H`: "node1:4,node2:4" or ["node1:4", "node2:4"]. By default
            those of `hostfile`, else of the scheduler's allocation, else this machine.
        hostfile: path of a hostfile.
        ranks: number of ranks, as `-n`. By default all slots.
        ranks_per_host: number of ranks on each host, as `--npernode`.
        env: environment variables of the ranks, beside those that `mpiddp launch` passes on.
        cwd: the ranks' working folder, which every host must have. By default the caller's.
        options: any other option of `mpiddp launch` by its long name: `timeout=120`, `max_restarts=2`,
            `log_ranks="all"`, `env_file=["a", "b"]`.

    Returns:
        The results in the order of the ranks, also if a stop request or `stop_after` has ended the job.

    Raises:
        RankFailed: a rank has failed; the exception of the first one is its `__cause__`.
        JobFailed: the job has failed for another reason.
        UserError: bad input, such as an unknown option; something cannot be pickled; cloudpickle or another
            package is missing on a host; or this process is itself a rank, or a worker of multiprocessing.
        TypeError: `function` cannot be called.
        KeyboardInterrupt: after Ctrl-C, once the job has ended.
    """
    _refuse_within_a_job(os.environ)
    if not callable(function):
        raise TypeError(f"mpiddp.spawn: expected a function, not {function!r}.")
    flags = {f"--{keyword.replace('_', '-')}": value for keyword, value in options.items()}
    flags |= {
        "--hostfile": None if hostfile is None else str(Path(hostfile).absolute()),  # not below cwd
        "-H": hosts if hosts is None or isinstance(hosts, str) else ",".join(hosts),
        "-n": ranks,
        "--npernode": ranks_per_host,
    }
    argv: list[str] = []
    for flag, value in flags.items():  # the launcher's parser checks their names and values
        values: Sequence[Value] = [value] if isinstance(value, (str, int, float)) else value or []
        if len(values) > 1 and flag not in _REPEATED:
            values = [",".join(map(str, values))]
        argv += [
            flag if value is True else f"{flag}={value}" for value in values if value is not False
        ]
    name, pickled = pickled_call(partial(function, *args))
    call = encode("call", pickled, options=argv, env=dict(env or {}))
    with errors.named_by("mpiddp.spawn:"):
        outcome, answers = _launched(call, cwd)
    code, sentence, rank = outcome["code"], outcome["sentence"], outcome["rank"]
    if code in (DONE, STOPPED):
        return [unpickled(body, name, rank) for rank, body in sorted(answers.items())]
    if code == BAD_INPUT:
        raise UserError(sentence or "a rank has refused its input. Its line above says why.")
    if code == INTERRUPTED or rank is None:  # a signal to the launcher, or no rank to name
        raise JobFailed(sentence)
    text, cause = "", None
    if rank in answers:
        text, body = pickle.loads(answers[rank])
        with suppress(UserError):  # the class of the error is missing here
            cause = unpickled(body, name, rank)
    raise RankFailed(sentence, rank, outcome["host"], text) from cause


def _refuse_within_a_job(env: Mapping[str, str]) -> None:
    """Raise UserError in a rank, in a process that a rank has started, and in multiprocessing's children.

    Each of them would start a job that starts it again.
    """
    # A child that is started by "spawn" first runs the caller's script again. It has no parent yet then.
    if parent_process() is not None or getattr(current_process(), "_inheriting", False):
        sentence = (
            "mpiddp.spawn is called in a process of multiprocessing, such as a DataLoader's worker."
        )
        raise UserError(
            sentence,
            fix='call it in the main process; in a script, below: if __name__ == "__main__":',
        )
    how = "mpiddp.spawn starts all ranks itself, but this process is already a part of a job"
    if is_joined(env) or JOB in env:
        raise UserError(f"{how} of mpiddp.", fix="call it once, outside of the job")
    if not in_slurm_terminal(env) and (world := World.from_env(env)).world_size > 1:
        sentence = f"{how}: rank {world.rank} of {world.world_size} ({world.launcher.name})."
        raise UserError(sentence, fix="start the script once, with python")


def pickled_call(call: partial[Any]) -> tuple[str, bytes]:
    """The name of the called function; and the pickle of the call, with the facts that a rank needs."""
    cloudpickle = errors.import_package("cloudpickle", "mpiddp.spawn")
    function = inspect.unwrap(call.func)
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    source = getattr(getattr(function, "__code__", None), "co_filename", "")
    lines = linecache.getlines(source)
    try:
        body = cloudpickle.dumps(call)
    except Exception as error:
        raise UserError(
            f"mpiddp.spawn cannot pickle {name}, its arguments and the variables that it uses: {named(error)}.",
            fix="create the object within the function, or in a module that it imports",
        ) from error
    facts = {
        "name": name,
        # An entry of linecache, which keeps an entry without a time of change.
        "source": {source: (sum(map(len, lines)), None, lines, source)},
        "path": [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)],  # noqa: PTH100
    }
    return name, b64encode(pickle.dumps((facts, body)))


def _launched(
    call: bytes, cwd: str | os.PathLike[str] | None
) -> tuple[dict[str, Any], dict[int, bytes]]:
    """Run a launcher with this call, see `mpiddp.launch.run.control.Exchange`, and show its output.

    Returns the job's outcome, and the answers by rank, as pickles: the results of all ranks, or the error of
    the rank that has failed first.
    """
    answers: dict[int, bytes] = {}
    outcome = None
    ours, theirs = socket.socketpair()
    # If anything fails here, the launcher finds its socket closed, and stops the job.
    with ours:
        with theirs:
            launcher = subprocess.Popen(
                [sys.executable, *OURS, "launch-function", str(theirs.fileno())],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=_flushed(sys.stdout, 1),
                stderr=_flushed(sys.stderr, 2),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C reaches it once, from here
            )
        # The first stops the job, a second one kills it, and so no job stays behind.
        with interrupts_end(lambda number, _: launcher.send_signal(number)):
            pairs = ((launcher.stdout, sys.stdout), (launcher.stderr, sys.stderr))
            copies = [
                threading.Thread(target=_copy, args=pair, daemon=True) for pair in pairs if pair[0]
            ]
            for copy in copies:
                copy.start()
            with suppress(OSError):  # it has ended, and its last line says why
                ours.sendall(call)
                for facts, body in messages_over(ours):
                    if facts["type"] == "answer":
                        answers[facts["rank"]] = b64decode(body)
                    else:
                        outcome = facts
            code = launcher.wait()
            for copy in copies:
                copy.join(_LAST_S)
    if outcome is None:
        raise JobFailed(
            f"the launcher ended early, with exit code {code}. Its last lines may say why."
        )
    return outcome, answers


def _flushed(stream: Any, number: int) -> int | None:
    """PIPE, or None if the launcher can write to the file descriptor, because the stream does so too."""
    with suppress(OSError, ValueError, AttributeError):  # a cell's, a closed one, or None
        stream.flush()
        return None if stream.fileno() == number else subprocess.PIPE
    return subprocess.PIPE


def _copy(pipe: IO[bytes], stream: Any) -> None:
    """Copy a stream of the launcher to the caller's, until the launcher ends."""
    # With newline="", a progress bar keeps its carriage returns.
    with io.TextIOWrapper(pipe, "utf-8", "backslashreplace", newline="") as lines:
        for line in lines:
            # Its reader went away: the output is lost.
            with suppress(OSError, ValueError, AttributeError):
                stream.write(errors.encodable(line, stream))
                stream.flush()


def unpickled(body: bytes, name: str, rank: int) -> Any:
    """The result of a rank, or its exception."""
    try:
        return _Unpickler(io.BytesIO(body)).load()
    except Exception as error:
        sentence = (
            f"the result of {name} from rank {rank} cannot be unpickled here: {named(error)}."
        )
        raise UserError(sentence, fix="return plain values, or tensors on the CPU") from error


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of a rank without changing the caller's own classes.

    cloudpickle sends a class of `__main__` by value, finds the caller's class again, and would replace its
    methods by the copies that came back, whose global variables are copies as well.
    """

    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name)

        def set_state(kind: type, state: object) -> Any:
            with suppress(KeyError, AttributeError):
                if attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind:
                    return kind
            return value(kind, state)

        return set_state if name == "_class_setstate" else value

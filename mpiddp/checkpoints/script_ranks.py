"""The ranks of a script that uses `mpiddp.Checkpoints`, under any launcher or none, and their groups."""

from __future__ import annotations

import atexit
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from mpiddp.checkpoints.saved import TensorGroup
from mpiddp.errors import FAILED, JobFailed, UserError, print_from_one_rank
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.script_exit import enter_until_exit, exit_now
from mpiddp.runtime.launcher.connected import script_session
from mpiddp.runtime.log import log_to_console
from mpiddp.runtime.start.join import join
from mpiddp.world import World


def script_coordinator(finish: Callable[[], None]) -> Coordinator:
    """The coordinator of this process. All ranks must call this: they join, unless they have joined before.

    Args:
        finish: called on every rank once its script has succeeded. If it raises an error, the process ends
            with code 1.

    Raises:
        UserError: inconsistent variables of launchers, a foreign MPI, or a process group whose rank 0
            already serves a store where the ranks would join.
        JobFailed: ranks that do not join.
    """
    session = script_session()
    world = World.from_env()
    if session.watch is None and world.launcher.name == "none":
        log_to_console(0)
        atexit.register(partial(_finish_alone, finish, os.getpid()))
        here = (socket.gethostname(),)
        only_rank = replace(world, node_rank=0, num_nodes=1)
        return Coordinator(only_rank, dist.HashStore(), hostnames=here)
    if session.watch is None:
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if dist.is_initialized() and not has_agent:
            raise UserError(
                "create mpiddp.Checkpoints before init_process_group, so that both use one store; or "
                "start the script with mpiddp run or torchrun."
            )
        enter_until_exit(join(world))
    assert session.coordinator is not None
    session.before_leaving(finish)
    return session.coordinator


def _finish_alone(finish: Callable[[], None], pid: int) -> None:
    if os.getpid() != pid:  # a forked child
        return
    try:
        finish()
    except JobFailed as error:
        print_from_one_rank(str(error), 0, 0)
        exit_now(FAILED)
    except BaseException:  # Python would print it, and end with the script's own code
        traceback.print_exc()
        exit_now(FAILED)


def tensor_group(coordinator: Coordinator) -> TensorGroup | None:
    """A group of all ranks for tensors on the CPU; None for a single rank. All ranks must call this.

    A script's own group of gloo serves. Beside NCCL's there is a new one, so that checkpoints need no
    memory of the GPUs.

    Raises:
        UserError: there is no process group of all ranks.
    """
    world = coordinator.world
    if world.world_size == 1:
        return None
    has_group = dist.is_available() and dist.is_initialized()
    if not has_group or (dist.get_rank(), dist.get_world_size()) != (world.rank, world.world_size):
        raise UserError(
            f"mpiddp.Checkpoints needs a process group of all {world.world_size} ranks. Call "
            "torch.distributed.init_process_group or mpiddp.init before resume() and save()."
        )
    is_gloo = dist.get_backend() == "gloo"
    return TensorGroup(torch.device("cpu"), None if is_gloo else dist.new_group(backend="gloo"))

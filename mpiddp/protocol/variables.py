"""The environment variables of this project, and the table of docs/environment.md.

python -m mpiddp.protocol.variables
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ADDRESS, SECRET, JOB = "MPIDDP_CONTROL", "MPIDDP_CONTROL_SECRET", "MPIDDP_JOB"
PLACEMENT, NETWORKS, INTERFACE = "MPIDDP_PLACEMENT", "MPIDDP_NETWORKS", "MPIDDP_INTERFACE"
TIMEOUT = "MPIDDP_TIMEOUT"
REPORT, VERBOSE, DATA = "MPIDDP_REPORT", "MPIDDP_VERBOSE", "MPIDDP_DATA"
ANNOUNCED, RUN_DIR = "MPIDDP_ANNOUNCED", "MPIDDP_RUN_DIR"
SCRIPT_SECRET = "MPIDDP_SCRIPT_SECRET"
GPUS, BIND = "MPIDDP_GPUS", "MPIDDP_BIND"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
RUN_ID, RESTART_COUNT = "MPIDDP_RUN_ID", "MPIDDP_RESTART_COUNT"
MAX_RESTARTS = "MPIDDP_MAX_RESTARTS"
OUTPUT, LOG_DIR = "MPIDDP_OUTPUT", "MPIDDP_LOG_DIR"
LOG_RANKS, PREFIX = "MPIDDP_LOG_RANKS", "MPIDDP_PREFIX"

MAX_TIMEOUT_S = 100_000_000  # 3 years; MPIDDP_TIMEOUT is below


def is_restart(env: Mapping[str, str]) -> bool:
    """Whether an earlier attempt of this job has run, under mpiddp launch or torchrun."""
    counts = (RESTART_COUNT, "TORCHELASTIC_RESTART_COUNT")
    return any(env.get(name, "0") != "0" for name in counts)


@dataclass(frozen=True)
class Variable:
    """An environment variable of this project, as docs/environment.md describes it."""

    name: str
    set_by: str
    read_by: str
    holds: str


# All MPIDDP_* variables. tests/test_environment.py fails if one is missing here.
VARIABLES = (
    Variable(
        INTERFACE,
        "the user, or `launch --interface`",
        "every rank",
        "the network of the job's traffic: an interface's name, an address, or a network such as "
        "10.0.0.0/24; several separated by commas",
    ),
    Variable(
        TIMEOUT,
        "the user, or `launch --timeout`",
        "every rank",
        "seconds in which all ranks must join (default: 60)",
    ),
    Variable(DATA, "the user", "`train`, `bench`", "the folder of data sets, as `--data-dir`"),
    Variable(
        "MPIDDP_PYTHON",
        "the user",
        "`run.sh`",
        "the Python to build the environment with, including its torch",
    ),
    Variable(
        "MPIDDP_MPIRUN", "the user", "`run.sh`", "the mpirun to use instead of Open MPI's wheel"
    ),
    Variable(
        PLACEMENT,
        "`launch`",
        "every rank",
        "the hosts of the job with their numbers of ranks: node1:4,node2:2",
    ),
    Variable(
        GPUS,
        "`launch`",
        "every rank",
        "for each host of MPIDDP_PLACEMENT, the variables that choose its GPUs, as JSON: a hostfile's gpus=, "
        "or CUDA_VISIBLE_DEVICES of the launcher's own host",
    ),
    Variable(
        BIND,
        "the user, or `launch --bind gpu`",
        "every rank",
        "gpu: bind each rank to the cores near its GPU",
    ),
    Variable(
        NETWORKS,
        "`launch`",
        "every rank",
        "the networks that lead to the other hosts, unless an interface is requested",
    ),
    Variable(
        REPORT,
        "`launch --report`",
        "every rank",
        "1: rank 0 prints the host and device of every rank",
    ),
    Variable(
        VERBOSE,
        "`launch -v`",
        "every rank",
        "1: print the master address, and each rank's interface",
    ),
    Variable(
        ANNOUNCED,
        "`launch`, at a restart",
        "every rank, through `mpiddp.announced`",
        "what an earlier attempt announced, as JSON: global_batch_size, world_size",
    ),
    Variable(
        RUN_DIR,
        "`launch`, at a restart",
        "`mpiddp.Checkpoints`",
        "the folder of the run that an earlier attempt created; a restart waits for its file system",
    ),
    Variable(
        RUN_ID,
        "`launch`; else every rank, from rank 0",
        "every rank and its child processes",
        "the run's id, the same in all attempts; a process with an equal TORCHELASTIC_RUN_ID is a rank "
        "of this run or its child, not torchrun's",
    ),
    Variable(
        RESTART_COUNT,
        "`launch`",
        "every rank",
        "how often the job has been restarted, also to grow; scripts find it in TORCHELASTIC_RESTART_COUNT",
    ),
    Variable(
        MAX_RESTARTS,
        "`launch`",
        "every rank",
        "`--max-restarts`; scripts find it in TORCHELASTIC_MAX_RESTARTS",
    ),
    Variable(
        LOG_RANKS,
        "the user",
        "`launch`",
        "the default of `--log-ranks`: the ranks whose output the launcher shows",
    ),
    Variable(
        PREFIX,
        "the user, or `run.sh` (never)",
        "`launch`",
        "the default of `--prefix`: auto, always or never",
    ),
    Variable(
        OUTPUT,
        "`launch`",
        "every rank, which removes it",
        "the ranks whose output the launcher shows; a rank then reads its own stdout and stderr",
    ),
    Variable(
        LOG_DIR,
        "the user, or `launch --log-dir`",
        "every rank under `launch`",
        "the folder of rank_00003.out and rank_00003.err, all that rank 3 printed",
    ),
    Variable(
        JOB,
        "`launch`",
        "`launch`",
        "the job's id, by which the launcher finds a job's leftover processes",
    ),
    Variable(
        ADDRESS,
        "`launch`",
        "every rank, which removes it; the script of a command",
        "the address on which the launcher listens for the ranks: ADDRESS:PORT, or unix:PATH",
    ),
    Variable(
        SECRET,
        "`launch`",
        "every rank, which removes it",
        "the secret that proves that a rank belongs to the job, in hex digits",
    ),
    Variable(
        SCRIPT_SECRET,
        "`run -- COMMAND`",
        "the script of a command that imports mpiddp, which removes it",
        "the secret that proves that a script belongs to a rank of the job, in hex digits",
    ),
)


def variables_table() -> str:
    """The table of docs/environment.md. `python -m mpiddp.protocol.variables` prints it."""
    head = "| variable | set by | read by | holds |\n|---|---|---|---|\n"
    rows = (f"| `{v.name}` | {v.set_by} | {v.read_by} | {v.holds} |\n" for v in VARIABLES)
    return head + "".join(rows)


if __name__ == "__main__":
    print(variables_table(), end="")

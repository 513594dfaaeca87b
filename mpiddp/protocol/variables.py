"""The names of this project's environment variables. docs/reference.md says what each holds."""

from __future__ import annotations

from collections.abc import Mapping

ADDRESS, SECRET, JOB = "MPIDDP_CONTROL", "MPIDDP_CONTROL_SECRET", "MPIDDP_JOB"
PRIVATE, LEFT_OUT = "MPIDDP_PRIVATE", "MPIDDP_LEFT_OUT"
PLACEMENT, NETWORKS, INTERFACE = "MPIDDP_PLACEMENT", "MPIDDP_NETWORKS", "MPIDDP_INTERFACE"
TIMEOUT = "MPIDDP_TIMEOUT"
VERBOSE = "MPIDDP_VERBOSE"
ANNOUNCED, RUN_DIR = "MPIDDP_ANNOUNCED", "MPIDDP_RUN_DIR"
CHANNEL, CHANNEL_SECRET = "MPIDDP_CHANNEL", "MPIDDP_CHANNEL_SECRET"
GPUS, BIND = "MPIDDP_GPUS", "MPIDDP_BIND"
ERROR_FILE, AGENT_STORE = "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"
RUN_ID, RESTART_COUNT = "MPIDDP_RUN_ID", "MPIDDP_RESTART_COUNT"
MAX_RESTARTS = "MPIDDP_MAX_RESTARTS"
OUTPUT, LOG_DIR = "MPIDDP_OUTPUT", "MPIDDP_LOG_DIR"
LOG_RANKS, PREFIX = "MPIDDP_LOG_RANKS", "MPIDDP_PREFIX"
OBSERVER, DRILL = "MPIDDP_OBSERVER", "MPIDDP_DRILL"
PROGRAM = "MPIDDP_PROGRAM"

JOIN_TIMEOUT_S = 60.0  # in which all ranks join, unless the user says otherwise


def is_restart(env: Mapping[str, str]) -> bool:
    """Whether an earlier attempt of this job has run, under mpiddp launch or torchrun."""
    counts = (RESTART_COUNT, "TORCHELASTIC_RESTART_COUNT")
    return any(env.get(name, "0") != "0" for name in counts)

"""The names of this project's environment variables. docs/reference.md says which a user may set."""

from __future__ import annotations

import re
from collections.abc import Mapping

ORDERS, JOB = "MPIDDP_ORDERS", "MPIDDP_JOB"
PLACEMENT, NETWORKS, INTERFACE = "MPIDDP_PLACEMENT", "MPIDDP_NETWORKS", "MPIDDP_INTERFACE"
TIMEOUT, LOST_AFTER = "MPIDDP_TIMEOUT", "MPIDDP_LOST_AFTER"
ANNOUNCED, RUN_DIR = "MPIDDP_ANNOUNCED", "MPIDDP_RUN_DIR"
LAUNCHER, COMMAND = "MPIDDP_LAUNCHER", "MPIDDP_COMMAND"
CHANNEL, CHANNEL_SECRET = "MPIDDP_CHANNEL", "MPIDDP_CHANNEL_SECRET"
PRIVATE, GPUS = "MPIDDP_PRIVATE", "MPIDDP_GPUS"
ERROR_FILE, AGENT_STORE = "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"
RUN_ID, RESTART_COUNT = "MPIDDP_RUN_ID", "MPIDDP_RESTART_COUNT"
MAX_RESTARTS, PREFIX = "MPIDDP_MAX_RESTARTS", "MPIDDP_PREFIX"
LOG_DIR, LOG_TO = "MPIDDP_LOG_DIR", "MPIDDP_LOG_TO"
REQUEUE = "MPIDDP_REQUEUE"
CONTAINER_BEGAN = "MPIDDP_CONTAINER_BEGAN"  # of the rank's image, in seconds since 1970
OBSERVER, DRILL, NO_PATCHES = "MPIDDP_OBSERVER", "MPIDDP_DRILL", "MPIDDP_NO_PATCHES"

# Variables that a login or a host sets for itself, and the paths of this Python.
OF_A_HOST = re.compile(
    "(HOME|USER|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|TMPDIR|TMP|TEMP|TZ|LANG|LANGUAGE|_)$"
    "|(HOST|HOSTNAME|DISPLAY|XAUTHORITY|KRB5CCNAME|PYTHON(HOME|EXECUTABLE|PLATLIBDIR|STARTUP))$"
    "|LC_|SSH_|XDG_|DBUS_"
)

JOIN_TIMEOUT_S = 60.0  # in which all ranks join, unless the user says otherwise
SAVE_GRACE_S = 600.0  # for a rank to end while it saves
LOST_AFTER_S = 45.0  # of silence, after which a host is lost, unless the user says otherwise
# Under `mpiddp launch`, the kernel, ssh and the MPI wait so many times as long, because only the launcher
# sees whether the steps go on.
PATIENCE = 10


def is_restart(env: Mapping[str, str]) -> bool:
    """Whether an earlier attempt of this job has run, under mpiddp launch or torchrun."""
    counts = (RESTART_COUNT, "TORCHELASTIC_RESTART_COUNT")
    return any(env.get(name, "0") != "0" for name in counts)

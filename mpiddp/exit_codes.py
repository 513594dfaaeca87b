"""The exit codes of the launcher, and of the ranks that it starts."""

DONE = 0
FAILED = 1
BAD_INPUT = 2
STOPPED = 75  # EX_TEMPFAIL: on request, after a checkpoint; the same command goes on
INTERRUPTED = 130  # 128 + SIGINT, as a shell has it

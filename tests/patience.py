"""How long a test waits for what has to come. Only what hangs takes it, however slow the machine."""

PATIENCE_S = 600.0

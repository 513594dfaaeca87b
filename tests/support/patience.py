"""The time limit of every wait in the tests. Only a test that hangs reaches it, even on a slow machine."""

PATIENCE_S = 600.0

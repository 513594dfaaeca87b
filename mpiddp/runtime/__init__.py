"""The code that runs inside every rank, for any script."""

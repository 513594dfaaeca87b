"""Looks at a running job: what its ranks report, who hangs, who is slow. It ends nothing."""

"""The faults of docs/evidence/faults.md, injected into real jobs on test hosts, and their tables."""

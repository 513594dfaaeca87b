"""The faults of docs/faults.md, injected into real jobs on test hosts, and the tables of the results."""

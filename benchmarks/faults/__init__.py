"""Every fault that docs/faults.md speaks of, done to real jobs on real hosts, and its table."""

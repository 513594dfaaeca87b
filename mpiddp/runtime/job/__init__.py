"""The ranks of a job: they agree, stop and end together."""

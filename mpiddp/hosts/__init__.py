"""The hosts of a job, and how to run a program on them. Standard library only."""

"""One attempt of a job, from its first process to its last."""

"""A rank's stdout and stderr, on their way to files and to the launcher."""

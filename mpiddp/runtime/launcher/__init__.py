"""A rank's connections to its launcher."""

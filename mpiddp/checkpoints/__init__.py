"""Checkpoints: directories that appear complete and are verified when they are read."""

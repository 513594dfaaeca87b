"""A directory that appears whole and is verified when read."""

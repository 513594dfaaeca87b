"""Which machines there are, and how to run something on them. Standard library only."""

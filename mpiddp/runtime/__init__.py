"""What runs inside every rank, for any script."""

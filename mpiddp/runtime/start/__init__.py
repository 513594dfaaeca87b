"""How a rank begins, and runs its script, its command or its function."""

"""What one person does on all hosts over ssh: `mpiddp hosts run` and its kin. Standard library only."""

"""What a launcher and its ranks agree on: variables and messages. It imports the standard library only."""

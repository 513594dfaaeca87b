"""What a rank needs around a command that is not a Python script: its process, and the stores."""

"""What goes between the ranks and the terminal: their output to it, and its stdin to rank 0."""

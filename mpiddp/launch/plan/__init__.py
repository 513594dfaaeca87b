"""From the options of `mpiddp launch` to the command that starts its ranks."""

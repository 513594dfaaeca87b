"""What the launcher does on the other hosts, over ssh."""

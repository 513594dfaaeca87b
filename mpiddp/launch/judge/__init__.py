"""What happened in an attempt, and what it means: hangs, stragglers, who failed first, the exit code."""

"""Start the ranks of a job, copy their output, and restart them."""

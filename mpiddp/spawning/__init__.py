"""`mpiddp.spawn`: a function in every rank of a job, from Python or a notebook."""

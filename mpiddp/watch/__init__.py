"""`mpiddp ps`, `top`, `stacks`, `stop`: a job that runs, from another terminal."""

"""`mpiddp doctor`: what will break on these hosts, before a job does."""

"""Explain what broke: a table of known failures, and `mpiddp explain LOGFILE`."""

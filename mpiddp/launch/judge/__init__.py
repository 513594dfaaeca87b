"""Judgements on the record of an attempt: hangs, stragglers, the rank that failed first, the exit code."""

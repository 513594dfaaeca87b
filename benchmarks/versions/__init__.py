"""The versions that mpiddp claims to run with: each installed, and a smoke test in it.

environments.py  the environments: a Python, and the versions of one kind
smoke.py         what a user does first, in each of them
results.py       the results, one line of JSON each, and their table
"""

"""BLAKE2 without OpenSSL.

`hashlib` loads OpenSSL even for the hashes that Python has itself. That is 3.7 MB (CPython 3.10 to 3.13
on Linux) of a launcher's 12 MB. Python's own BLAKE2 is in the extension module `_blake2`.
tests/test_still_needed.py fails on the day that hashlib does without.
"""

from _blake2 import blake2b

__all__ = ["blake2b"]

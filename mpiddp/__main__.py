"""`python -m mpiddp COMMAND …`, the same as the console script `mpiddp`."""

import sys

# -m puts the working folder first, and a user's signal.py there is not Python's own.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from mpiddp.cli import main

sys.exit(main())

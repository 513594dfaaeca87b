"""`python -m mpiddp COMMAND …`, the same as the console script `mpiddp`."""

import sys

from mpiddp.cli import main

sys.exit(main())

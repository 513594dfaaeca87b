"""Rank 0 ends well, later than rank 1 ends with code 3."""

import os
import sys
import time

if os.environ["RANK"] == "0":
    time.sleep(30)
else:
    sys.exit(3)

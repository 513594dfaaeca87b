"""Rank 1 ends with code 3. Rank 0 would succeed later."""

import os
import sys
import time

if os.environ["RANK"] == "0":
    time.sleep(30)
else:
    sys.exit(3)

"""The inputs of hypothesis: the same in every run, and others, many more, with --hypothesis-profile=long."""

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

# Its default is .hypothesis in the checkout.
set_hypothesis_home_dir(Path(tempfile.gettempdir(), f"mpiddp-hypothesis-{os.getuid()}"))
always = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("suite", max_examples=60, derandomize=True, **always)
settings.register_profile("long", max_examples=20_000, **always)
settings.load_profile("suite")

"""More inputs for the tests of parsers."""

from hypothesis import HealthCheck, settings

# test_parsers.py with other inputs in every run, and many more: pytest --hypothesis-profile=long
settings.register_profile(
    "long",
    max_examples=20_000,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

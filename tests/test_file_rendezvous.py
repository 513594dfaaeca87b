"""init_method="file://…": works on a shared folder, and is refused in one sentence elsewhere.

Tests mpiddp/runtime/file_rendezvous.py.
python -m pytest tests/test_file_rendezvous.py
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cluster
from tests.cluster import Cluster
from tests.ranks import LAUNCH, ROOT, launch, script

EXAMPLE = ROOT / "examples/pitfalls/file_init.py"
SUM = "the ranks of 2 add up to 1\n"


@pytest.mark.quick
def test_a_new_file_works_and_one_of_an_earlier_job_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "store"
    done = launch("-H", "localhost:2", str(EXAMPLE), str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, SUM, "")
    file.unlink(missing_ok=True)  # torch removes it, if the last rank runs its destructors

    file.write_text("of a job that was killed")
    done = launch("-H", "localhost:2", "--max-restarts", "1", str(EXAMPLE), str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(  # mpirun may add its own lines
        f"init_method file://{file}: the file is left over from an earlier job, and the ranks would read "
        f"its values. Run: rm {file}\n"
    )
    assert list(tmp_path.iterdir()) == [file]


def test_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    done = launch("-H", "localhost:2", str(EXAMPLE), str(tmp_path / "store"))
    assert (done.returncode, done.stdout, done.stderr) == (0, SUM, "")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    done = launch("-H", "localhost:2", str(EXAMPLE), str(tmp_path / "none/store"))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"init_method file://{tmp_path}/none/store: the folder {tmp_path}/none does " in done.stderr
    )
    assert "Traceback" not in done.stderr  # mpirun may add its own lines


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def on_two_hosts(hosts: Cluster, folder: Path) -> subprocess.CompletedProcess[str]:
    """The example's result. Nothing is left in the folder of either host."""
    for host in hosts.hosts:
        host.path(folder).mkdir(exist_ok=True)
    done = hosts["node0"].run(
        [*LAUNCH, "-H", "node0:1,node1:1", str(EXAMPLE), str(folder / "store")],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MPIDDP_PREFIX": "never"},
    )
    assert [list(host.path(folder).iterdir()) for host in hosts.hosts] == [[], []]
    return done


def test_hosts_that_share_the_folder_join(hosts: Cluster) -> None:
    done = on_two_hosts(hosts, hosts.shared / "store-of-a-test")
    assert (done.returncode, done.stdout) == (0, SUM), done.stderr


def test_hosts_that_do_not_share_the_folder_are_refused(hosts: Cluster) -> None:
    done = on_two_hosts(hosts, Path("/run/store-of-a-test"))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "node1 does not see what node0 writes there, so the ranks would wait" in done.stderr
    assert "Traceback" not in done.stderr  # mpirun may add its own lines


# These ranks become a user who may not search the folder; the others stay root.
OF_ANOTHER_USER = """
import os, sys
import torch.distributed as dist

rank = os.environ["RANK"]
if rank in sys.argv[2]:
    os.seteuid(65534)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(rank), world_size=2)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(
    ("ranks", "file", "sentence"),
    [
        ("01", "store", "cannot write into {folder}: Permission denied."),
        ("1", "store", "cannot read {folder}/.store."),  # the file that rank 0 has written
        ("01", "deeper/store", "cannot read {folder}/deeper: Permission denied. Name a file "),
    ],
)
def test_a_folder_that_the_user_may_not_search_is_refused(
    tmp_path: Path, ranks: str, file: str, sentence: str
) -> None:
    job = script(tmp_path, OF_ANOTHER_USER)
    with tempfile.TemporaryDirectory() as parent:  # not tmp_path, which is closed to others
        Path(parent).chmod(0o755)
        folder = Path(parent, "closed")
        (folder / "deeper").mkdir(parents=True)
        folder.chmod(0o700)
        done = launch("-H", "localhost:2", job, str(folder / file), ranks)
        assert [path.name for path in folder.iterdir()] == ["deeper"]
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"init_method file://{folder / file}: " in done.stderr
    assert sentence.format(folder=folder) in done.stderr
    assert "Traceback" not in done.stderr  # mpirun may add its own lines

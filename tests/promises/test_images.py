"""Images: --image runs each rank in a container, as it would run without one."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import cluster as test_cluster
from tests.support.cluster import Cluster, Host
from tests.support.cluster.faults import mounted
from tests.support.cluster.host import USER, USER_ID
from tests.support.cluster.needs import need
from tests.support.machine import tool
from tests.support.patience import eventually
from tests.support.place import program
from tests.support.ranks import ALL_OUTPUT, ROOT

IMAGE = "podman://mpiddp-test:1"
# The limits of a machine may be lower than Podman's defaults, and crun wants one version of cgroups alone.
CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
"""
# The image has folders alone, so that a test needs no download. What runs in it is mounted.
MOUNTS = ("/usr", sys.prefix, sys.base_prefix, str(ROOT))
MOUNTED = [word for path in dict.fromkeys(MOUNTS) for word in ("--mount", path)]
MAKES = """
set -e
cd "$(mktemp -d)"
mkdir -p root/usr root/etc root/tmp root/proc root/sys root/dev
for name in bin lib lib64; do ln -s usr/$name root/$name; done
echo TEXT > root/etc/mpiddp-test
tar --mtime=@0 --sort=name -C root -c . | podman import - mpiddp-test:1
"""


def make(host: Host, text: str = "of the image") -> None:
    host.run(["sh", "-c", MAKES.replace("TEXT", text)], check=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    need("podman")
    with test_cluster.up_or_skip(2) as up, ExitStack() as stack:
        for host in up.hosts:
            stack.enter_context(mounted(host, "/var/lib/containers"))
            conf = host.path("/etc/containers/containers.conf")
            conf.parent.mkdir(exist_ok=True)
            conf.write_text(CONF)
        make(up["node0"])
        yield up


PYTHON_THERE = f"PATH={Path(sys.executable).parent}:/usr/bin"


def launched(*options: str) -> list[str]:
    return ["launch", "-H", "node0:1,node1:1", "--image", IMAGE, *MOUNTED, *options]


def containers(cluster: Cluster) -> list[str]:
    lists = (
        host.run(["podman", "ps", "--all", "--format", "{{.Names}}"], check=True)
        for host in cluster.hosts
    )
    return [name for done in lists for name in done.stdout.split()]


def test_an_image_is_pushed(hosts, cluster):
    """A host without the image, or with another one, is refused before the start, and a push sends the image."""
    launch = launched("--", "cat", "/etc/mpiddp-test")
    for why in ("image not known", "is another image"):
        done = hosts.run(*launch).assert_code(2)
        assert why in done.said[0]
        assert done.fixes == [f"mpiddp hosts push -H node0:1,node1:1 --image {IMAGE}"]
        push = ("hosts", "push", "-H", "node0,node1", "--image", IMAGE)
        assert hosts.run(*push).assert_ok().lines == [f"node1: has {IMAGE} now"]
        assert hosts.run(*push).assert_ok().lines == ["node1: nothing has changed"]
        assert hosts.run(*launch).assert_ok().lines == ["of the image"] * 2
        make(cluster["node1"], "of another image")
    alone = hosts.run(
        "launch", "-H", "node0:1", "--image", "podman://no/image", "--", "true"
    ).assert_code(2)
    assert alone.fixes == ["podman pull no/image"]


NO_SERVICE = "echo 'Cannot connect to the Docker daemon. Is the docker daemon running?' >&2; exit 1"
SERVICE = "[ $2 = ls ] || { echo 'No such image' >&2; exit 1; }"


@pytest.mark.usefixtures("image")
def test_the_program_that_has_the_image(hosts):
    """Of Docker and Podman, all hosts use the one that has the image. One whose service is off is named."""
    name = IMAGE.removeprefix("podman://")
    launch = ("launch", "-H", "node0:1,node1:1", *MOUNTED, "--image")
    for docker in (NO_SERVICE, SERVICE):
        path = tool(hosts.folder, "docker", docker)
        done = hosts.run(*launch, name, "--", "cat", "/etc/mpiddp-test", env={"PATH": path})
        assert done.assert_ok().lines == ["of the image"] * 2
        done = hosts.run(*launch, "no/image", "--", "true", env={"PATH": path}).assert_code(2)
        answers = "docker" if docker == SERVICE else "podman"
        assert {*done.fixes} == {
            f"mpiddp hosts push -H node0:1,node1:1 --image {answers}://no/image"
        }
    path = tool(hosts.folder, "docker", NO_SERVICE)
    done = hosts.run(*launch, f"docker://{name}", "--", "true", env={"PATH": path}).assert_code(2)
    assert "Cannot connect to the Docker daemon" in done.said[0]
    assert done.fixes == ["docker info", "ssh node1 docker info"]


@pytest.fixture
def image(cluster: Cluster) -> None:
    """Both hosts have the same image."""
    for host in cluster.hosts:
        make(host)


@pytest.mark.usefixtures("image")
def test_ranks_in_an_image(hosts, cluster):
    """Scripts in containers form a group; a rank that fails is named and restarted; no container is left."""
    for name in ("reduces.py", "identity.py"):
        shutil.copy(program(name), hosts.folder)
    done = hosts.run(*launched("-x", PYTHON_THERE), "reduces.py")
    ranks = done.assert_ok().records
    assert [(rank["host"], rank["RANK"], rank["sum"]) for rank in ranks] == [
        ("node0", 0, 3),
        ("node1", 1, 3),
    ]
    assert {rank["cwd"] for rank in ranks} == {str(hosts.folder)}
    fails = hosts.script("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    done = hosts.run(*launched("--max-restarts", "1"), fails).assert_code(1)
    assert [line for line in done.said if "exit code" in line][-1].startswith(
        "rank 1 on node1 ended first, with exit code 7."
    )
    assert any("restart 1 of 1" in line for line in done.said)
    assert containers(cluster) == []


ANNOUNCES = """
import os, sys, mpiddp
path, how = sys.argv[1:]
if how == "Checkpoints":
    with mpiddp.process_group():
        with mpiddp.Checkpoints(path, every=1) as checkpoints:
            checkpoints.resume()
else:
    mpiddp.announce(resume_args=["--epochs", "3", "/etc/mpiddp-test", how.format(path)])
print("began", flush=True)
"""


@pytest.mark.usefixtures("image")
def test_a_folder_that_is_lost_with_its_container(hosts, cluster):
    """If a script announces a folder that only its container has, the job ends, and the fix is a `--mount`."""
    for how in ("Checkpoints", "{}", "--resume={}"):
        job = (*launched("-x", PYTHON_THERE, hosts.script(ANNOUNCES)),)
        done = hosts.run(*job, "/srv/my runs/new", how)
        sentence = "/srv/my runs/new is inside the container only, and is lost with it."
        assert sentence in done.said[-1]
        assert (done.code in (1, 2), done.fixes[-1:]) == (True, ["--mount '/srv/my runs'"])
        if how == "Checkpoints":
            assert (done.code, done.said) == (2, [sentence])
        # The working folder, and one of --mount.
        with mounted(cluster["node0"], "/srv"), mounted(cluster["node1"], "/srv"):
            for path, mount in (("new", ()), ("/srv/new", ("--mount", "/srv"))):
                done = hosts.run(*job[:-1], *mount, job[-1], path, how).assert_ok()
                assert {*done.lines} == {"began"}


SLEEPS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("sleeps", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize("end", ["ctrl-c", "launcher", "agent", "rank"])
def test_no_container_outlives_its_job(hosts, cluster, end):
    """Ctrl-C reaches the scripts in their containers. After a kill -9 of the launcher, or an agent, none is left."""
    job = hosts.start(*launched(hosts.script(SLEEPS))).until("sleeps", 2)
    assert len(containers(cluster)) == 2
    if end == "ctrl-c":
        os.kill(job.pid, signal.SIGINT)
        assert job.wait().code == 75
    elif end == "launcher":
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    else:
        marker = "mpiddp run" if end == "agent" else "podman run"
        hosts.kill(next(process for process in hosts.processes(marker) if process.host == "node1"))
        named = (
            r"rank 1 on node1 (was killed by SIGKILL|ended first, without an error: it was killed)"
        )
        assert re.search(named, job.wait().assert_code(1).stderr)
    eventually(lambda: not (hosts.processes("script.py") or containers(cluster)))


def test_an_image_without_root(cluster):
    """Podman of a user who is not root gives the ranks that user's id."""
    node0 = cluster["node0"]
    for file in ("subuid", "subgid"):
        node0.path(f"/etc/{file}").write_text(f"{USER}:100000:65536\n")
    user = {"user": USER, "env": {**ALL_OUTPUT, "PYTHONPATH": str(ROOT)}}
    node0.run(["mkdir", "-p", "/dev/mqueue"], check=True)  # which a container of his mounts
    node0.run(["sh", "-c", MAKES], check=True, **user)
    launch = [
        sys.executable,
        "-m",
        "mpiddp",
        "launch",
        "-H",
        "localhost:2",
        "--image",
        IMAGE,
        *MOUNTED,
    ]
    # Podman is found although the PATH for the container does not lead to it.
    job = ("-x", "PATH=/nowhere", "--", "/bin/sh", "-c", "/bin/id -u; echo $USER $HOME")
    done = node0.run([*launch, *job], **user)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted([f"{USER_ID}", f"{USER} /tmp"] * 2)

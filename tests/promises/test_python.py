"""Python: functions, notebooks, frameworks and meshes on the ranks; measurements and reports."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support import installs, tiny_data
from tests.support.cluster import lacking
from tests.support.place import Here, Hosts, Place, eventually, here_and_on_hosts, program
from tests.support.ranks import ROOT, find_mpirun
from tests.support.run_folders import write_run
from tests.support.training import records, steps_kept

HYBRID = str(ROOT / "examples/hybrid.py")


def spawns(place: Place, how: str) -> list[str]:
    """The command of a script that calls mpiddp.spawn. Of the hosts, only node0 has its file."""
    if isinstance(place, Here):
        return ["python", program("spawns.py"), "localhost:2", how]
    assert isinstance(place, Hosts)
    home = place["node0"].home()
    for name in ("spawns.py", "spawned.py"):
        shutil.copy(program(name), place["node0"].path(f"{home}/{name}"))
    return ["python", f"{home}/spawns.py", "node1:1,node0:1", how]


@here_and_on_hosts
def test_spawn_returns_results(place):
    """mpiddp.spawn runs a function on every rank, even on hosts without its file, and returns the results."""
    done = place.run(*spawns(place, "sums")).assert_ok()
    names = ["node1", "node0"] if isinstance(place, Hosts) else place.hosts * 2
    assert done.lines[-2:] == [f"{name} {10 * rank} 3" for rank, name in enumerate(names)]
    assert sorted(done.lines[:-2]) == ["out 0", "out 1"]


OWN_MODULES = {
    "calls.py": """\
import os

import helper
import mpiddp
import space.shifts
from pkg import scale


def work(x):
    from torch.utils.data import DataLoader

    import sets

    kinds = ("fork", "spawn", "forkserver")
    loaders = [
        DataLoader(sets.Numbers(), 4, num_workers=1, multiprocessing_context=each) for each in kinds
    ]
    sums = [int(batch.sum()) for loader in loaders for batch in loader]
    return [helper.locked(scale(space.shifts.shifted(x))), *sums, helper.DATA.exists()]


print(mpiddp.spawn(work, 1, hosts="node1:1,node0:1"))
print(mpiddp.spawn(helper.locked, 1, hosts="node1:1"))
with open(helper.__file__, "a") as file:
    file.write("VERSION = 2\\n")
print(mpiddp.spawn(helper.locked, 1, hosts="node1:1"))
try:
    mpiddp.spawn(helper.fails, hosts="node1:1")
except mpiddp.RankFailed as error:
    assert isinstance(error.__cause__, helper.Trouble)
    print(error.traceback)
""",
    "helper.py": """\
import threading
from pathlib import Path

LOCK = threading.Lock()
LOG = open("/dev/null", "w")
THREAD = threading.Thread(target=threading.Event().wait, daemon=True)
THREAD.start()
DATA = Path(__file__).with_name("data.txt")
VERSION = 1


class Trouble(Exception):
    pass


def locked(x):
    with LOCK:
        return x + VERSION


def fails():
    raise Trouble("in helper")  # this line
""",
    "sets.py": """\
class Numbers:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index
""",
    "pkg/__init__.py": "from .inner import scale\n",
    "pkg/inner.py": "def scale(x):\n    from . import lazy\n    return lazy.FACTOR * x\n",
    "pkg/lazy.py": "FACTOR = 10\n",
    "space/shifts.py": "def shifted(x):\n    return x + 1\n",
    "data.txt": "beside a module",
}


def test_spawn_ships_own_modules(hosts):
    """A function's own modules travel as source: packages, what it imports late, a module that holds a lock.

    An edited module counts from the next call on. A data file beside a module does not travel.
    """
    host = hosts["node0"]
    home = f"{host.home()}/ships"
    for name, text in OWN_MODULES.items():
        file = host.path(f"{home}/{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    done = hosts.run("python", f"{home}/calls.py").assert_ok()
    assert done.lines[:3] == ["[[21, 6, 6, 6, False], [21, 6, 6, 6, True]]", "[2]", "[3]"]
    assert f'File "{home}/helper.py", line ' in done.stdout
    assert 'raise Trouble("in helper")  # this line\n' in done.stdout


def test_spawn_raises_the_first_failure(hosts):
    """mpiddp.spawn raises the exception of the first rank that fails, with its traceback."""
    done = hosts.run(*spawns(hosts, "fails")).assert_ok()
    assert done.lines[0] == "1 node0 Trouble(7)"
    assert "raise spawned.Trouble(7)" in done.stdout


def test_spawn_restarts_saves_and_stops(here):
    """A spawned function restarts, saves, resumes and stops as a script does."""
    done = here.run(*spawns(here, "restarts")).assert_ok()
    assert done.lines[-1] == "[1, 1]"
    assert steps_kept(here.folder / "run") == [1]
    done = here.run(*spawns(here, "stops")).assert_ok()
    first, second = json.loads(done.lines[-1])
    assert first == second > 5


@pytest.mark.parametrize(
    ("place", "number"), [("here", signal.SIGINT), ("hosts", signal.SIGKILL)], indirect=["place"]
)
def test_end_of_the_caller(place, number):
    """If the process that called mpiddp.spawn ends, its job ends on every host."""
    job = place.start(*spawns(place, "sleeps")).until("ready", 2)
    job.signal(number)
    job.wait()
    eventually(lambda: not place.processes())


def test_notebook(here):
    """A notebook's cell shows the results, output and exceptions of the ranks, and can be interrupted."""
    env = installs.environment("ipykernel")
    done = here.run("python", program("notebook.py"), env=env).assert_ok()
    assert done.lines == ["results", "output", "modules", "exception", "interrupt"]
    eventually(lambda: not here.processes())


def test_lightning(hosts):
    """PyTorch Lightning works unchanged on several hosts."""
    job = (program("lightning_training.py"), str(hosts.folder / "out"), "1", "2")
    done = hosts.run("launch", *hosts.where(2), *job, env=installs.environment("lightning"))
    done.assert_ok()
    losses = dict(re.findall(r"^rank (\d) of 2: loss (\S+)$", done.stdout, re.M))
    assert losses["0"] == losses["1"]
    assert float(losses["0"]) < 0.2
    saved = sorted(path.name for path in (hosts.folder / "out").iterdir())
    assert saved == ["last.ckpt", "saved-epoch=4.ckpt"]


def test_accelerate(here):
    """accelerate passes its own test scripts under mpiddp."""
    env = installs.environment("accelerate") | {"ACCELERATE_USE_CPU": "1"}
    options = ("-x", "ACCELERATE_USE_CPU", *here.where(2))
    for name in ("test_script", "test_ops", "test_sync"):
        module = f"accelerate.test_utils.scripts.{name}"
        here.run("launch", *options, "-m", module, env=env).assert_ok()


def test_transformers(here):
    """The Trainer of transformers trains on all ranks, and saves."""
    env = installs.environment("transformers")
    job = (program("transformers_training.py"), "out")
    done = here.run("launch", *here.where(2), *job, env=env).assert_ok()
    assert sorted(re.findall(r"^rank (\d) of 2: 6 steps$", done.stdout, re.M)) == ["0", "1"]
    saved = sorted(path.name for path in (here.folder / "out").glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-6"]


def groups(text: str, name: str) -> list[list[int]]:
    """The groups of ranks along a dimension, which their ranks agree on."""
    ranks = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found = sorted({tuple(each["groups"][name]) for each in ranks})
    assert sorted(rank for group in found for rank in group) == list(range(len(ranks)))
    return [list(group) for group in found]


def test_mesh_on_unequal_hosts(hosts):
    """mpiddp.mesh keeps tensor-parallel groups within hosts, even with unequal slots."""
    job = (program("mesh_groups.py"), "plain")
    done = hosts.fork("node0:4,node1:2", *job, "tp=2").assert_ok()
    assert groups(done.stdout, "tp") == [[0, 1], [2, 3], [4, 5]]
    assert groups(done.stdout, "dp") == [[0, 2, 4], [1, 3, 5]]
    refused = hosts.run("launch", *hosts.where(2), *job, "tp=2")
    assert refused.code == 2, refused.stderr
    assert refused.stderr.count("mpiddp.mesh: tp=2") == 1
    mpirun = [find_mpirun(), "--allow-run-as-root", "--bind-to", "none", "--map-by", "node"]
    ranks = ("-H", "node0:2,node1:2", "-np", "4", sys.executable, "-m", "mpiddp", "run", *job)
    dealt = hosts.run(*mpirun, *ranks, "tp=2")  # ranks 0 and 1 are on two hosts
    assert dealt.code == 2, dealt.stderr
    assert dealt.stderr.count("mpiddp.mesh: tp=2") == 1
    done = hosts.fork("node0:1,node1:1", *job, "tp=2", "tp_across_hosts").assert_ok()
    assert groups(done.stdout, "tp") == [[0, 1]]


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, "dp=3 tp=1"), (2, "tp=1RANK"), (1, "device_type=gpu0")]
)
def test_mesh_that_does_not_fit(here, ranks, sizes):
    """A mesh that does not fit, or that differs between ranks, is refused in one line."""
    job = (program("mesh_groups.py"), "init", *sizes.split())
    done = here.run("launch", *here.where(ranks), *job)
    assert done.code == 2, done.stdout
    assert done.stderr.count("mpiddp.mesh: ") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_mesh_is_planned_without_the_cluster(here):
    """`mpiddp mesh` prints each group of ranks, and the bytes of a step on each link, without any GPU."""
    job = ("--hosts", "64", "--gpus", "8", "dp=32", "tp=8", "pp=2")
    model = ("--params", "7B", "--layers", "32", "--hidden", "4096", "--seq", "4096")
    text = here.run("mesh", *job, *model, "--micro-batches", "16").assert_ok().stdout
    assert text.startswith("512 GPUs (64 hosts × 8): pp=2 dp=32 tp=8\n")
    for piece in (
        "host1   8-15     0   1   0-7",
        "tp: 64 groups of 8 ranks, each inside 1 host\n  0-7  8-15  16-23  …  504-511",
        "dp: 16 groups of 32 ranks, each over 32 hosts\n  0-248:8  1-249:8  2-250:8  …  263-511:8",
        "pp: 256 groups of 2 ranks, each over 2 hosts\n  0,256  1,257  2,258  …  255,511",
    ):
        assert piece in text, text
    sent = text.partition("sent in one step")[2].splitlines()[1:4]
    assert [line.split()[:5] for line in sent] == [
        ["tp", "60.1", "GB", "0", "B"],
        ["dp", "0", "B", "13.6", "GB"],
        ["pp", "0", "B", "4.3", "GB"],
    ]
    assert len(text.splitlines()) < 26
    assert max(map(len, text.splitlines())) <= 110


def test_hybrid_example(here):
    """examples/hybrid.py combines data and tensor parallelism, and has the losses of one process."""

    def losses(ranks: int, *options: str) -> list[float]:
        done = here.fork(HYBRID, *options, ranks=ranks).assert_ok()
        return [float(each) for each in re.findall(r"step \d+: loss ([0-9.]+)", done.stdout)]

    one = losses(0)
    assert one[-1] < one[0] / 2  # it learns, so a wrong gradient shows
    assert losses(4, "--tp", "2") == pytest.approx(one, rel=1e-4)


def bench(here: Here, name: str, *options: str) -> tuple[dict[str, Any], list[str]]:
    """The results of a benchmark, and the cells of its table's last row."""
    done = here.run("bench", name, *options, "--out", "out").assert_ok()
    record = json.loads((here.folder / f"out/{name}.json").read_text())
    assert record["benchmark"] == name
    return record["results"], done.stdout.splitlines()[-3].split()


TINY = ("--arch", "resnet20", "--batch-size", "2", "--rounds=1")


def test_bench(here):
    """`mpiddp bench` measures the scaling efficiency, and the bus bandwidth of all-reduces."""
    options = ("-H", "localhost:2", *TINY, "--steps=4")
    results, row = bench(here, "scaling", *options)
    assert all(0 < run["step_time_p50_s"] <= run["step_time_p95_s"] for run in results["runs"])
    speeds = {run["ranks"]: run["images_per_s"] for run in results["runs"]}
    assert (row[0], row[7]) == ("2", f"{speeds[2] / 2 / speeds[1]:.3f}")
    options = ("-H", "localhost:3", "--max-size=1M", "--seconds=0.000001")
    results, row = bench(here, "allreduce", *options)
    point = results["points"][-1]
    assert len(point["seconds"]) == 5
    assert float(row[4]) == pytest.approx(2**20 / median(point["seconds"]) / 1e9 * 4 / 3, abs=1e-3)


def test_bench_beside_what_people_compare(here):
    """`mpiddp bench` measures starts and restarts, steps beside a bare loop, and data beside the model."""
    # torchrun may hang until the time limit, or give up.
    results, _ = bench(here, "restart", "-H", "localhost:2", "--rounds=1", "--timeout=60")
    own, torchrun = results["starts"]
    assert 0 < own["wall_s"][0] < 60
    assert torchrun["launcher"] == "torchrun"
    results, row = bench(here, "start", "--ranks=1", "--rounds=1")
    starts = {start["launcher"]: start for start in results["starts"]}
    for start in starts.values():
        assert 0 < start["wall_s"][0] < 120
        assert start["cpu_s"][0] > 0
    assert row[1:3] == ["torchrun", f"{starts['torchrun']['wall_s'][0]:.2f}"]
    results, _ = bench(here, "step", "-H", "localhost:1", *TINY, "--steps=4")
    assert results["step_s"].keys() == {"runner", "bare loop", "bare loop again"}
    phases = [seconds for name, (seconds,) in results["phases_s"].items() if name != "waiting"]
    assert min(phases) > 0
    tiny_data.image_folder(here.folder / "keep", 8, 2)  # the name of an option
    options = ("--dataset=image-folder", "--data-dir", "keep", "--batches=2", "--workers=0,1")
    results, row = bench(here, "loader", "-H", "localhost:1", *TINY, *options)
    assert len(results["images_per_s"]) == 2
    (speed,) = results["images_per_s"].popitem()[1]
    assert row[-1] == f"{speed / results['model_images_per_s']:.1f}"


def test_bench_ends_with_its_jobs(here):
    """A benchmark that is stopped leaves no process behind."""
    options = ("-H", "localhost:2", "--steps", "1000000", "--arch", "resnet20", "--out", "out")
    job = here.start("bench", "scaling", *options)
    eventually(lambda: here.processes("mpiddp.bench.rank"))
    job.signal(signal.SIGTERM)
    assert job.wait().code != 0
    eventually(lambda: not here.processes())


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser for which every address but a file is unreachable."""
    if find_spec("selenium") is None or not Path("/usr/bin/chromedriver").exists():
        lacking("a page needs selenium, and: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield browser
    finally:
        browser.quit()


def test_report_in_a_browser(here):
    """`mpiddp report` writes a page for a browser about a run, its restarts and its lost time."""
    train = (program("watched_training.py"), str(here.folder), "--use-syn", "--batch-size=4")
    train += ("--arch=resnet20", "--steps-per-epoch=20", "--epochs=1", "--save-every=10")
    train += ("--backend=gloo", "--log-every=1", "--out=<b>run")
    launch = ("launch", *here.where(1), "--max-restarts", "1", *train)
    here.run(*launch, env={"KILL_AFTER_STEPS": "15"}).assert_ok()
    here.run("report", "<b>run", "-o", "page.html").assert_ok()
    with chromium() as browser:
        browser.set_window_size(390, 900)
        browser.get((here.folder / "page.html").as_uri())
        idle = "return Bokeh.documents.length > 0 && Bokeh.documents.every(each => each.is_idle)"
        eventually(lambda: browser.execute_script(idle))
        text = browser.execute_script("return document.body.innerText")
        assert [each for each in browser.get_log("browser") if each["level"] != "INFO"] == []
    assert "<b>run" in text
    assert "1 on 1 host" in text
    assert "Time lost" in text


@pytest.mark.slow
def test_report_of_a_large_run(here):
    """The report of a long run on a thousand ranks is smaller than 5 MB, and escapes every text."""
    attack = "</script><script>window.attacked = 1</script><b id=attack>"
    many = {"steps": 200_000, "saves": [100_000], "num_ranks": 1024}
    write_run(here.folder / "run", **many, config={attack: attack}, failures={5: attack})
    here.run("report", "run", "-o", "page.html").assert_ok()
    assert (here.folder / "page.html").stat().st_size < 5_000_000
    with chromium() as browser:
        browser.get((here.folder / "page.html").as_uri())
        assert not browser.execute_script("return window.attacked || window.attack")
        assert attack in browser.execute_script("return document.body.textContent")


def test_runs(here):
    """`mpiddp runs` lists the runs of a folder: state, step, accuracy, loss, rate, duration."""
    write_run(here.folder / "a", steps=1000, every=10, restarts_at=[300], saves=[300, 1000])
    write_run(here.folder / "b", failures={1: "OSError: gone"}, ends=False)
    script = here.folder / "c\x1b[31m"
    (script / "checkpoints").mkdir(parents=True)
    (script / "metrics.jsonl").write_text('{"step": 7, "loss": 0.5}\n{"st')
    (here.folder / "notes").mkdir()
    assert here.run("runs", ".").assert_ok().lines == [
        "RUN        STATE    STEP  ACCURACY     LOSS            RATE  DURATION",
        "a          done    1,000    91.00%   0.1972  1,000 images/s    17 min",
        "b          failed    100    91.00%  0.06387  1,049 images/s     100 s",
        "c\\x1b[31m  -           7         -      0.5               -         -",
    ]


RECORDS_EVERY_FIFTH = """
import mpiddp
checkpoints = mpiddp.Checkpoints("run")
checkpoints.resume()
for step in range(1, 13):
    if step % 5 == 0:
        mpiddp.log_metrics(step, loss=1 / step)
    checkpoints.due(step)
"""


def test_steps_that_were_made(here):
    """`mpiddp runs` and its --json show the steps that a script has made, not those of its last record."""
    here.run("launch", *here.where(1), here.script(RECORDS_EVERY_FIFTH)).assert_ok()
    assert here.run("runs", ".").assert_ok().lines[1].split()[:3] == ["run", "done", "12"]
    (run,) = json.loads(here.run("runs", "--json", ".").assert_ok().stdout)["runs"]
    assert (run["path"], run["state"], run["step"], run["train_loss"]) == ("run", "done", 12, 0.1)


# Prints the records that the viewer has got, as {name: [[step, value], …]}.
READS = """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("run/tensorboard")
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [[each.step, each.value] for each in events.Scalars(tag)] for tag in tags}))
"""


def test_log_to(here):
    """--log-to tensorboard has each record once, even after a resume. It needs that package."""
    data = tiny_data.image_folder(here.folder / "data", 9, 3)
    train = ("--backend=gloo", "--arch=resnet20", "--dataset=image-folder", "--epochs=2")
    train += (f"--data-dir={data}", "--image-size=32", "--global-batch-size=8", "--log-every=1")
    train += ("--log-to=tensorboard", "--num-workers=0", "--out=run")
    refused = here.train(*train)
    assert (refused.code, "pip install tensorboard" in refused.stderr) == (2, True), refused.stderr
    env = installs.environment("tensorboard")
    assert here.train(*train, "--stop-at-step=2", env=env).code == 75
    here.train(*train, env=env).assert_ok()
    found = records(here.folder / "run")
    got = json.loads(here.run("python", "-c", READS, env=env).assert_ok().lines[-1])
    for name in ("train_loss", "lr", "test_accuracy"):
        expected = [[each["step"], each[name]] for each in found if name in each]
        assert got[name] == [[step, pytest.approx(value)] for step, value in expected]

"""Checkpoints of sharded models: exact resume, other numbers of ranks and forms, export, damage, kills.

Tests mpiddp/checkpoints/save_shards.py, shards.py and contents.py.
python -m pytest tests/ranks/checkpoints/test_sharded_checkpoints.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from socket import gethostname

import pytest
import torch

from mpiddp.checkpoints import folder as directory
from mpiddp.checkpoints.folder import MANIFEST
from mpiddp.checkpoints.send import receiver_of, shards_at
from mpiddp.cli import main
from mpiddp.train.resnet import ARCHS
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env
from tests.support.tiny_data import two_epochs
from tests.support.training import Command, Ranks, Turn, contents, records, unequal, waiting_ranks

SAVE_ALL = ("--save-every=1", "--keep=99")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from waiting_ranks(4, tmp_path_factory.mktemp("pool"))


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def sharded(run: Path, step: int) -> dict[str, object]:
    """All tensors of a sharded checkpoint, by the names of its files; training.pt names the run's folder."""
    files = step_folder(run, step).glob("*.pt")
    return {file.name: torch.load(file) for file in files if file.name != "training.pt"}


def losses(run: Path) -> list[float]:
    return [record["train_loss"] for record in records(run) if "train_loss" in record]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Resume


@pytest.mark.parametrize(
    ("ranks", "options", "steps", "step"),
    [
        (
            2,
            ["--amp=off", "--batch-size=3", "--grad-accum-steps=2", "--clip-grad-norm=1"],
            6,
            4),
        (3, ["--amp=bf16", "--batch-size=4"], 4, 1),
        (1, ["--amp=off", "--batch-size=12"], 4, 1),
    ],
)  # fmt: skip
def test_a_resumed_run_has_the_same_shards_statistics_and_rng(
    tmp_path: Path, pool: Ranks, ranks: int, options: list[str], steps: int, step: int
) -> None:
    command = two_epochs(tmp_path, *options, "--parallel=fsdp")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    start = step_folder(whole, step)
    ran = pool.run(
        ranks,
        tmp_path,
        [[*command, *SAVE_ALL, "--out", whole], [*command, "--out", resumed, f"--resume={start}"]],
    )
    assert [turn.code for turn in ran] == [0, 0], ran[0].stderr + ran[1].stderr
    assert f"resuming from {start}: step {step}\n" in ran[1].stdout
    assert unequal(sharded(whole, steps), sharded(resumed, steps)) == []
    assert unequal(sharded(whole, steps), sharded(whole, step)) != []  # the test can fail
    assert names(start) == [
        "COMPLETE", "manifest.json", "model.pt", "optimizer.pt", "ranks.pt", "scaler.pt",
        *(f"shard_{rank:05d}.pt" for rank in range(ranks)), "shards.json", "state.json", "training.pt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("saves", "resumes"),
    [((2, "sharded"), (4, 3, 1)), ((4, "sharded"), (2,)), ((2, "whole"), (3,))],
)
def test_shards_load_at_any_number_of_ranks(
    tmp_path: Path, pool: Ranks, saves: tuple[int, str], resumes: tuple[int, ...]
) -> None:
    """Into a model that is sharded, and into one that is not."""
    job = ["-m", "tests.jobs.sharded_script"]
    (ran,) = pool.run(saves[0], tmp_path, [[*job, "save", tmp_path / "run", saves[1]]])
    assert ran.code == 0, ran.stderr
    for ranks in resumes:
        for parallel in ("sharded", "whole"):
            folder = tmp_path / f"{ranks} {parallel}"
            shutil.copytree(tmp_path / "run", folder)
            (ran,) = pool.run(ranks, tmp_path, [[*job, "resume", folder, parallel]])
            assert ran.code == 0, ran.stderr


# Errors


def test_a_first_save_that_fails_ends_no_run(tmp_path: Path, pool: Ranks) -> None:
    run = tmp_path / "run"
    job = ["-m", "tests.jobs.sharded_script", "lose", run, "sharded"]
    (ran,) = pool.run(2, tmp_path, [job])
    assert ran.code == 0, ran.stderr
    first = ran.stderr.splitlines()[0]
    where = f"warning: {gethostname()}: {run}/checkpoints: "
    values = (where, "step 1", "Not a directory", "There is no older checkpoint")
    assert re.fullmatch(error("", *values), first), first
    directory.verify(step_folder(run, 3))


# A run that the tests below resume, export and damage


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, pool: Ranks) -> tuple[Path, Command]:
    """A run of two ranks with checkpoints of the steps 1, 2 and 3 of 6; and its command."""
    folder = tmp_path_factory.mktemp("stopped")
    command = two_epochs(folder, "--global-batch-size=8", "--log-every=1", "--amp=off")
    stop: Command = ["--out", folder / "out", "--stop-at-step=3", *SAVE_ALL, "--parallel=fsdp"]
    (ran,) = pool.run(2, folder, [[*command, *stop]])
    assert (ran.code, ran.stderr) == (75, "")
    return folder / "out", command


def copied(stopped: tuple[Path, Command], to: Path) -> Path:
    return Path(shutil.copytree(stopped[0], to))


def resume(pool: Ranks, stopped: tuple[Path, Command], folder: Path, *options: str | Path) -> Turn:
    (ran,) = pool.run(2, folder, [[*stopped[1], *map(str, options)]])
    return ran


def test_each_form_resumes_from_the_other_and_from_an_export(
    stopped: tuple[Path, Command], tmp_path: Path, pool: Ranks
) -> None:
    """DDP continues with shards, with an export of them, and FSDP with what DDP has saved."""
    start = step_folder(stopped[0], 3)
    assert main(["checkpoints", "export", str(stopped[0]), str(tmp_path / "whole")]) == 0
    directory.verify(tmp_path / "whole")
    model = ARCHS["resnet20"](num_classes=3)
    model.load_state_dict(torch.load(tmp_path / "whole" / "model.pt"))

    found = {}
    for name, parallel, checkpoint in (
        ("fsdp", "fsdp", start),
        ("ddp", "ddp", start),
        ("exported", "ddp", tmp_path / "whole"),
        ("back", "fsdp", tmp_path / "whole"),
        ("from ddp", "fsdp", step_folder(tmp_path / "ddp", 4)),
    ):
        out = tmp_path / name
        options = [f"--parallel={parallel}", f"--resume={checkpoint}", f"--out={out}", *SAVE_ALL]
        ran = resume(pool, stopped, tmp_path, *options)
        assert ran.code == 0, ran.stderr
        found[name] = losses(out)
    assert len(found["fsdp"]) == 3
    for name in ("ddp", "exported", "back"):
        assert found[name] == pytest.approx(found["fsdp"], rel=1e-4), name
    assert found["from ddp"] == pytest.approx(found["fsdp"][1:], rel=1e-4)
    assert unequal(contents(tmp_path / "ddp", 6), contents(tmp_path / "exported", 6)) == []
    assert unequal(sharded(tmp_path / "fsdp", 6), sharded(tmp_path / "back", 6)) == []


def test_export_refuses(
    stopped: tuple[Path, Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(folder: Path, out: Path) -> str:
        assert main(["checkpoints", "export", str(folder), str(out)]) == 2
        return capsys.readouterr().err

    one, new = step_folder(stopped[0], 1), tmp_path / "new"
    exists = error("exists already", f"{tmp_path} ")
    assert re.fullmatch(f"{exists}\n", refusal(one, tmp_path))
    lacks = shutil.copytree(one, tmp_path / "lacks")
    (lacks / "shard_00001.pt").unlink()
    missing = error(":", f"{lacks}: ", "shard_00001.pt is missing")
    assert re.fullmatch(f"{missing}\n", refusal(lacks, new))
    manifest(lacks)
    elsewhere = error("host keeps", f"{lacks} ", "shard_00001.pt")
    assert re.fullmatch(f"{elsewhere}\n", refusal(lacks, new))
    assert names(tmp_path) == ["lacks"]


def manifest(folder: Path) -> None:
    """Write the manifest of the files that are there, as a host does that has no other ones."""
    kept = [path for path in folder.iterdir() if path.name not in (MANIFEST, directory.COMPLETE)]
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}
        for path in kept
    }
    (folder / MANIFEST).write_text(json.dumps(entries))
    digest = sha256((folder / MANIFEST).read_bytes()).hexdigest()
    (folder / directory.COMPLETE).write_text(digest)
    directory.verify(folder)


def flip_bit(folder: Path) -> str:
    file = folder / "shard_00001.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "shard_00001.pt does not match its SHA-256"


def lose(folder: Path) -> str:
    """As on a host that keeps the shards of other ranks only."""
    (folder / "shard_00001.pt").unlink()
    manifest(folder)
    return "shard_00001.pt is on none of these hosts, or is of another save"


def mix(folder: Path) -> str:
    older = folder.with_name("step_00000002")
    shutil.copy(older / "shard_00001.pt", folder / "shard_00001.pt")
    manifest(folder)
    return "shard_00001.pt is on none of these hosts, or is of another save"


@pytest.mark.parametrize("damage", [flip_bit, lose, mix])
def test_a_damaged_shard_makes_the_run_resume_from_the_older_checkpoint(
    stopped: tuple[Path, Command], tmp_path: Path, pool: Ranks, damage: object
) -> None:
    run = copied(stopped, tmp_path / "run")
    assert callable(damage)
    problem = damage(step_folder(run, 3))
    named = resume(
        pool, stopped, tmp_path, "--parallel=fsdp", f"--resume={step_folder(run, 3)}",
        f"--out={tmp_path / 'new'}",
    )  # fmt: skip
    assert named.code == 2
    id = ":"
    sentence = error(id, f"{step_folder(run, 3)}: checkpoint step_00000003: {problem}. ")
    assert re.search(f"{sentence}\n", named.stderr), named.stderr
    ran = resume(pool, stopped, tmp_path, "--parallel=fsdp", f"--out={run}", "--keep=99")
    assert ran.code == 0, ran.stderr
    assert (
        f"checkpoint step_00000003: {problem}; resuming from step_00000002 (1 steps lost)."
    ) in ran.stdout
    assert unequal(sharded(run, 2), sharded(stopped[0], 2)) == []
    if damage is not flip_bit:  # it is verified by itself, so it would count as the newest one
        assert step_folder(run, 3).with_name("step_00000003.old-1").exists()
    directory.verify(step_folder(run, 6))


def test_verify_list_and_prune_know_the_files_of_shards(
    stopped: tuple[Path, Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(stopped, tmp_path / "run")
    three = step_folder(run, 3)

    def call(*arguments: str) -> tuple[int, list[str], str]:
        code = main(["checkpoints", *arguments])
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err

    def states() -> list[str]:
        return [re.split("  +", line)[-1] for line in call("list", str(run))[1]]

    assert states() == ["intact"] * 3
    lose(three)
    without = (
        f"checkpoint {three.name}: verified, without shard_00001.pt: other hosts must have them"
    )
    assert call("verify", str(three)) == (0, [without], "")
    assert states() == ["intact"] * 3
    mix(three)
    of_another = f"checkpoint {three.name}: shard_00001.pt is of another save.\n"
    assert call("verify", str(three)) == (1, [], of_another)


# The ring of hosts


def test_every_shard_lies_on_two_file_systems() -> None:
    """Hosts with 2, 2 and 1 ranks; ranks of hosts that share a file system; one file system."""
    writer_of = (0, 0, 2, 2, 4)
    assert [receiver_of(rank, writer_of) for rank in range(5)] == [2, 3, 4, 4, 0]
    assert [shards_at(rank, writer_of) for rank in (0, 2, 4)] == [
        [0, 1, 4],
        [0, 1, 2, 3],
        [2, 3, 4],
    ]
    assert receiver_of(1, (0, 0, 0)) is None


# Kills


@pytest.mark.slow
def test_50_kills_in_mid_save_lose_at_most_one_save(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.jobs.killed_shards", tmp_path / "run", "50"],
        env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = re.fullmatch(r"50 kills, (\d+) in mid-write, step \d+\n", ran.stdout)
    assert found is not None, ran.stdout
    assert int(found[1]) > 5, "too few kills during a write"


def test_a_run_of_ddp_still_writes_whole_checkpoints(
    stopped: tuple[Path, Command], tmp_path: Path, pool: Ranks
) -> None:
    ran = resume(pool, stopped, tmp_path, f"--out={tmp_path / 'ddp'}", "--stop-at-step=1")
    assert ran.code == 75, ran.stderr
    assert contents(tmp_path / "ddp", 1)["model"].keys() == ARCHS["resnet20"]().state_dict().keys()

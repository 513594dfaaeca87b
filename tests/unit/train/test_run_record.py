"""What the record of a start has, and what it leaves out.

Tests mpiddp/train/run_record.py.
python -m pytest tests/unit/train/test_run_record.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mpiddp.train import run_record
from mpiddp.train.run_record import git_state, public, without_password, without_secrets


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "app_secret", "DB_PASSWORD", "AWS_CREDENTIALS"]
)
def test_secret_variables_have_no_value(name: str) -> None:
    assert public({name: "hunter2", "OMP_NUM_THREADS": "2"}) == {
        name: "…",
        "OMP_NUM_THREADS": "2",
    }


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://me:hunter2@proxy:3128", "https://…@proxy:3128"),
        ("https://ghp_hunter2@github.com/a/b", "https://…@github.com/a/b"),
        ("redis://:hunter2/@2@cache/0", "redis://…@cache/0"),
        ("me:hunter2@host", "…@host"),
        ("--proxy=me:hunt@er2@host", "--proxy=…@host"),
        ("https://host:8080/path", "https://host:8080/path"),
        ("/usr/bin:/opt/gcc@13/bin:/home/me", "/usr/bin:/opt/gcc@13/bin:/home/me"),
        ("me@host", "me@host"),
    ],
)
def test_passwords_of_urls_are_left_out(text: str, kept: str) -> None:
    assert without_password(text) == kept


def test_the_commit_and_the_changes_of_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *who, *arguments],
            cwd=tmp_path,
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        )
        return done.stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "train.py").write_text("lr = 1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = {"commit": git("rev-parse", "HEAD"), "diff": "", "diff_is_cut": False}
    assert git_state(tmp_path) == clean
    (tmp_path / "train.py").write_text("lr = 2\nproxy = 'https://me:hunter2@proxy'\n")
    changed = git_state(tmp_path)
    assert changed is not None
    assert changed["diff"].endswith("-lr = 1\n+lr = 2\n+proxy = 'https://…@proxy'\n")
    monkeypatch.setattr(run_record, "_DIFF_BYTES", 20)
    cut = git_state(tmp_path)
    assert cut is not None
    assert (len(cut["diff"]), cut["diff_is_cut"]) == (20, True)


def test_a_long_word_takes_no_time() -> None:
    """The pattern takes the square of its length, while the interpreter's lock is held."""
    word = "a:" * 500_000
    assert without_password(f"{word} me:hunter2@host") == f"{word} …@host"
    assert without_password(f"{word}@host") == "…"


def test_a_changed_setting_keeps_its_secret() -> None:
    lines = (
        "+OPENAI_API_KEY=sk-hunter2-hunter2",
        '-    "HF_TOKEN": "hf_hunter2hunter2",',
        "+TOKEN_SIZE = 512",
        "+tokens = tokenizer.encode(text)",
        "+NUM_WORKERS=1234567890",
    )
    kept = without_secrets("\n".join(lines)).splitlines()
    assert kept == ["+OPENAI_API_KEY=…", '-    "HF_TOKEN": …', *lines[2:]]

"""The tables of docs/evidence/performance.md and docs/evidence/gpu.md, from the records of the stages.

The text between two marks is replaced. A stage that has not run leaves its cells empty.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.speed import AUTOTUNED, COMPILED, DEFAULTS, PLAIN, SETTINGS, TARGET_ACCURACY
from benchmarks.gpu.stages import GROUPS
from mpiddp.bench.report import markdown
from mpiddp.errors import UserError

BEGIN, END = "<!-- from here: python -m benchmarks.gpu table -->", "<!-- to here -->"
NOT_RUN = "not run yet"

Records = dict[str, list[dict[str, Any]]]  # of each stage, the newest last
Figures = dict[str, Any]


def fill(results: Path, root: Path) -> None:
    """Fill the tables of the pages in `root`/docs from all results.json files below `results`.

    Raises:
        UserError: there is no such folder, or a page has no marks.
    """
    if not results.is_dir():
        raise UserError(f"{results} is not a folder of results.json files.")
    found = read(results)
    _replace(root / "docs/evidence/performance.md", figures(found))
    _replace(root / "docs/evidence/gpu.md", behaviours(found))


def read(results: Path) -> Records:
    """The records of real runs, without rehearsals. The same record in two files counts once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted(results.rglob("results*.json")):
        for record in json.loads(file.read_text()):
            if not record["rehearsal"]:
                found[record["stage"], record.get("started", "")] = record
    records: Records = defaultdict(list)
    for (stage, _), record in sorted(found.items()):
        records[stage].append(record)
    return records


def _replace(page: Path, text: str) -> None:
    content = page.read_text()
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f'{page} has no "{BEGIN}" with "{END}" after it.')
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def behaviours(records: Records) -> str:
    """The table of what only a GPU can show, and whether it has been seen."""
    rows = [
        [behaviour, f"`{stage.name}`", state_of(records.get(stage.name, []))]
        for group in GROUPS.values()
        for stage in group.stages
        for behaviour in stage.shows
    ]
    return f"{_where(records)}{markdown(('behaviour', 'stage', 'state'), rows)}"


def state_of(records: list[dict[str, Any]]) -> str:
    """ "seen", "mended" if it failed before, "failed: why", or NOT_RUN."""
    if not records:
        return NOT_RUN
    last = records[-1]
    if last["state"] == "passed":
        has_failed = any(record["state"] == "failed" for record in records)
        return "mended" if has_failed else "seen"
    reason = re.sub(r"\s+", " ", last.get("reason", "")).replace("|", "\\|")
    return f"{last['state']}: {reason[:160]}".rstrip(": ")


def figures(records: Records) -> str:
    """The tables of the speeds."""
    rows = [[name, target, _cell(show, stage, records)] for name, target, stage, show in ROWS]
    tables = [markdown(("measurement", "target", "found"), rows)]
    tables.append(f"Convolutions in fp32 use TF32, torch's default.\n\n{_settings(records)}")
    kernels = _figures("profile", records).get("profile", {})
    if kernels:
        tables.append(_profile(kernels))
    return _where(records) + "\n\n".join(tables)


def _where(records: Records) -> str:
    found = _figures("machine", records)
    if not found.get("gpus"):
        return ""
    versions = f"torch {found['torch']}, CUDA {found['cuda']}, NCCL {found['nccl']}"
    return f"On one {found['gpus'][0]} with {found['cores']} cores, {versions}.\n\n"


def _figures(stage: str, records: Records) -> Figures:
    """The newest of each figure of a stage. An attempt that was stopped has those that it had until then."""
    found: Figures = {}
    for record in records.get(stage, []):
        found |= record.get("figures") or {}
    return found


def _cell(show: Callable[[Figures], str], stage: str, records: Records) -> str:
    found = _figures(stage, records)
    try:
        return show(found) if found else ""
    except (KeyError, IndexError, ValueError):  # a stage that ended before this figure
        return state_of(records.get(stage, []))


def _resnet50(found: Figures) -> str:
    speeds = {name: median(each) for name, each in found.items()}
    return ", ".join(f"{speed:,.0f} images/s ({name})" for name, speed in speeds.items())


def _cifar10(found: Figures) -> str:
    reached = [
        (name, each) for name, each in found.items() if each["test_accuracy"] >= TARGET_ACCURACY
    ]
    name, each = reached[-1] if reached else next(iter(found.items()))
    return (
        f"{each['test_accuracy']:.2%} after {name}: {each['steps_s']:.0f} s of steps, "
        f"{each['command_s']:.0f} s from the command to its end"
    )


def _loader(found: Figures) -> str:
    folders = [each for each in found["sources"] if each["source"].startswith("image folder")]
    best = max(folders, key=lambda each: float(each["times_model"]))
    workers = best["source"].partition(", ")[2]
    speed = best["images_per_s"]["median"]
    return f"{best['times_model']:.2f} ({speed:,.0f} images/s, {workers})"


def _step(found: Figures) -> str:
    shares = {each["loop"]: each["to_bare"]["median"] for each in found["loops"]}
    return f"{shares['runner']:.3f} (the bare loop again: {shares['bare loop again']:.3f})"


def _start(found: Figures) -> str:
    ours, theirs = (median(found[name]) for name in ("mpiddp launch", "torchrun"))
    return f"{found['ratio']:.2f} ({ours:.1f} s and {theirs:.1f} s)"


def _memory(found: Figures) -> str:
    return f"{found['peak_allocated_bytes'] / 2**30:.1f} GiB"


ROWS: tuple[tuple[str, str, str, Callable[[Figures], str]], ...] = (
    (
        "ResNet-50, 224×224, synthetic, bf16, channels_last",
        "≥ 3,600 images/s",
        "resnet50",
        _resnet50,
    ),
    ("its peak memory, batch 256", "", "profile", _memory),
    (
        "ResNet-152, 32×32, batch 8192: speed of the defaults over fp32, NCHW",
        "≥ 2.5",
        "resnet152",
        lambda found: f"{found['ratio']:.2f}",
    ),
    ("CIFAR-10 to 94 %", "≤ 60 s", "cifar10", _cifar10),
    ("image folder: images/s of the loader over those of ResNet-50", "≥ 1.0", "loader", _loader),
    ("a step of `mpiddp train` over one of a bare loop", "≤ 1.02", "step", _step),
    (
        "from the command to the first all-reduce over NCCL: `mpiddp launch` over torchrun",
        "≤ 1.0",
        "start",
        _start,
    ),
)


def _settings(records: Records) -> str:
    """ResNet-50 with each setting; the speed is relative to fp32, NCHW."""
    plain = _figures("settings", records)
    compiled = _figures("compiled", records) | _figures("autotuned", records)
    base = median(plain[PLAIN]) if plain.get(PLAIN) else None
    rows = []
    for name in (*SETTINGS, *COMPILED, *AUTOTUNED):
        each = plain.get(name) or compiled.get(name)
        label = name if name in SETTINGS else f"{DEFAULTS}, {name}"
        speed = f"{median(each):,.0f}" if each else ""
        rows.append([label, speed, f"{median(each) / base:.2f}" if each and base else ""])
    return markdown(("setting of ResNet-50, batch 256", "images/s", "speed"), rows)


def _profile(found: Figures) -> str:
    """The time of a step by kind of kernel, and its longest kernels."""
    total = sum(found["kinds_ms"].values())
    kinds = [
        [kind, f"{ms:.2f}", f"{ms / total:.0%}"] for kind, ms in found["kinds_ms"].items() if ms
    ]
    longest = [
        [f"`{each['kernel'][:90]}`".replace("|", "\\|"), f"{each['ms']:.2f}", f"{each['calls']:g}"]
        for each in found["top"][:8]
    ]
    return (
        f"A step of ResNet-50 with the defaults takes {found['step_ms']:.1f} ms, in which the GPU "
        f"computes {found['busy']:.0%} of the time:\n\n"
        f"{markdown(('kernels', 'ms a step', 'share'), kinds)}\n\n"
        f"{markdown(('longest kernels', 'ms a step', 'calls a step'), longest)}"
    )

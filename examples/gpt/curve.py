"""Draw the losses of a run: python examples/gpt/curve.py runs/gpt gpt.png

Reads the run's metrics.jsonl, and needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from matplotlib.figure import Figure

BLUE, ORANGE = "#0072B2", "#E69F00"  # of Okabe and Ito's colours, which everybody can tell apart


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the losses of a run of train.py.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    options = parser.parse_args()
    try:
        text = (options.run / "metrics.jsonl").read_text()
    except OSError as error:
        refuse(f"{options.run / 'metrics.jsonl'}: {error.strerror}. Name the folder of a run.")
    records = [record for line in text.splitlines() if (record := parsed(line))]
    if not records:
        refuse(f"{options.run / 'metrics.jsonl'} has no records of train.py yet.")
    try:
        draw(records).savefig(options.picture, dpi=150)
    except (OSError, ValueError) as error:  # a format that matplotlib does not know
        refuse(f"{options.picture}: {error}")


def parsed(line: str) -> dict[str, Any] | None:
    """The record; None of a line that is half written, or that another program wrote."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record if "loss" in record else None


def refuse(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(2)


def draw(records: list[dict[str, Any]]) -> Figure:
    """Both losses over the steps."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    validated = [each for each in records if "validation_loss" in each]
    axes.plot(*columns(records, "loss"), color=BLUE, linewidth=1, label="training")
    axes.plot(*columns(validated, "validation_loss"), "o-", color=ORANGE, label="validation")
    for each in validated[-1:]:
        axes.annotate(
            f"{each['validation_loss']:.2f}",
            (each["step"], each["validation_loss"]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="right",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("nats per character")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def columns(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [each["step"] for each in records], [each[name] for each in records]


if __name__ == "__main__":
    main()

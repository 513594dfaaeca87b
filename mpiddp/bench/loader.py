"""`mpiddp bench loader`: images/s of a data source, beside the speed of the model.

The source is the one that the options of `mpiddp train` name, else a generated folder of JPEGs. A folder of
images is read with each number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiddp.arguments import whole
from mpiddp.bench.figures import Result, aligned, shown, spread
from mpiddp.bench.jobs import Jobs, note
from mpiddp.bench.options import option, wholes
from mpiddp.text import counted

_MOST_TIMES = 10.0  # the model never waits for a source that is so much faster


@dataclass(frozen=True)
class Options:
    workers: tuple[int, ...] = option(
        "numbers of workers for a folder of images", type=wholes(0), default="0,2,4"
    )
    images: int = option("images in the generated folder", type=whole(4), default=512)
    batches: int = option("batches per pass and rank", type=whole(2), default=32)
    rounds: int = option("rounds of all numbers of workers", type=whole(1), default=3)


def measure(options: Options, jobs: Jobs) -> Result:
    note(f"loader: {counted(jobs.slots, 'rank')}, {counted(options.rounds, 'round')} per source")
    found = jobs.run("loader", options, ranks=jobs.slots)
    model = found["model_images_per_s"]
    sources = []
    for source in found["sources"]:
        speed = spread(source["images_per_s"])
        sources.append({**source, "images_per_s": speed, "times_model": speed["median"] / model})
    return {**found, "ranks": jobs.slots, "sources": sources}


def table(results: Result) -> str:
    arch, model = results["arch"], results["model_images_per_s"]
    rows = []
    for source in results["sources"]:
        times = source["times_model"]
        ratio = f"{times:.1f}" if times <= _MOST_TIMES else f">{_MOST_TIMES:.0f}"
        rows.append(
            [source["source"], shown(source["images_per_s"], ",.0f"), f"{model:,.0f}", ratio]
        )
    head = ("source", "images/s over all ranks", f"{arch} images/s", "loader / model")
    title = (
        f"{counted(results['ranks'], 'rank')}, batches of {results['batch_size']}. Below 1 the model "
        "waits for the source"
    )
    return f"{title}\n\n{aligned(head, rows)}"

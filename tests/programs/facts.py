"""A script that prints its environment: what it is, what it imports, and that its objects can be pickled."""

import dataclasses
import json
import multiprocessing
import pickle
import sys
from pathlib import Path

import identity

import __main__


@dataclasses.dataclass
class Thing:
    number: int = 0


def double(thing: Thing) -> Thing:
    return Thing(2 * thing.number)


if __name__ == "__main__":
    found = {
        "RANK": 0,
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "doc": __doc__,
        "loader": type(__loader__).__name__,
        "path": sys.path[0],
        "builtins": type(__builtins__).__name__,
        "cwd": str(Path.cwd()),
        "globals": sorted(set(globals()) - {"__annotations__", "__loader__", "found"}),
        "main is me": __main__.Thing is Thing,
        "package": [__package__, getattr(__spec__, "name", None)],
        "neighbour": identity.__file__,
        "data": Path("data.txt").read_text(encoding="utf-8"),
        "pickled": pickle.loads(pickle.dumps(Thing(7))).number,
    }
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["spawned"] = pool.map(double, [Thing(21)])[0].number
    print(json.dumps(found))
    sys.exit(3)

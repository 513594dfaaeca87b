"""Checkpoints of earlier versions: files of torch.save, and shards with the paths of their tensors.

model.pt         the entry "model"; None in the places of tensors in shards
ranks.pt         what each rank has saved for itself
shard_00001.pt   {"[\"model\", \"fc.weight\"]": {"shape": [10, 64], "offsets": [5, 0], "box": …}, …}
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.boxes import joined
from mpiddp.checkpoints.files import read_saved
from mpiddp.checkpoints.state import SHARDS, Keys, mapped, stem_of


def read_old(files: Mapping[str, Path], keys: Sequence[str]) -> dict[str, Any]:
    """What tree.pt has today: the state with its tensors, and what each rank has saved for itself."""
    state = {key: read_saved(files[f"{stem_of(key)}.pt"]) for key in keys}
    boxes: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for name in files:
        for key, each in read_saved(files[name]).items() if name.startswith(SHARDS) else ():
            box, offsets = each["box"], None if each.get("is_plain") else each["offsets"]
            boxes[key].append((box, [each["shape"], offsets, box.shape]))

    def value_of(path: Keys, value: Any) -> Any:
        parts = boxes.get(json.dumps(path)) if value is None else None
        return joined(path, parts[0][0].dtype, parts) if parts else value

    return {"state": mapped(state, value_of), "ranks": read_saved(files["ranks.pt"])}

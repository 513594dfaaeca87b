"""Local ranks of the pods of a PyTorchJob, which no launcher sets.

Tests mpiddp/world.py, mpiddp/runtime/start/join.py, mpiddp/runtime/rendezvous/store.py.
python -m pytest tests/cluster/launch/test_local_ranks_of_pods.py
"""

from __future__ import annotations

import sys

from tests.support import cluster
from tests.support.local_ranks import SHOW
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

RUN = (sys.executable, "-m", "mpiddp", "run")


def shown(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("shown"))


def test_the_pods_of_a_pytorchjob() -> None:
    """The master's own MASTER_ADDR is localhost, as Kubeflow's operator sets it."""
    with cluster.up_or_skip(2) as hosts:
        (hosts.shared / "show.py").write_text(SHOW)
        env = {"WORLD_SIZE": "2", "MASTER_PORT": "23456", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        pods = [
            hosts[name].popen(
                [*RUN, str(hosts.shared / "show.py")],
                cwd=ROOT,
                env=env | {"RANK": str(rank), "MASTER_ADDR": address},
            )
            for rank, (name, address) in enumerate([("node0", "localhost"), ("node1", "node0")])
        ]
        outputs = [pod.communicate(timeout=PATIENCE_S) for pod in pods]
    assert shown(outputs[0][0] + outputs[1][0]) == [
        "shown 0 0 1 0 2 True",
        "shown 1 0 1 1 2 True",
    ], outputs

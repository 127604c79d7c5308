"""A Ray cluster of several nodes on this machine, each a raylet with a store and workers.

What Ray promises between machines is tried between these processes: a node dies as one does, by
SIGKILL of its raylet, and another may join.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

OBJECT_STORE_BYTES = 100 * 2**20


class RayNodes:
    """The cluster; `address` is its head's."""

    def __init__(self, cluster: Any) -> None:  # noqa: ANN401 - Ray has no types
        self._cluster = cluster
        self.address: str = cluster.address

    def add(self) -> None:
        """Let a node with one CPU join."""
        self._cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)

    def kill_one(self) -> None:
        """Kill a node that is not the head."""
        victim = next(
            node for node in self._cluster.list_all_nodes() if node is not self._cluster.head_node
        )
        self._cluster.remove_node(victim, allow_graceful=False)


@contextlib.contextmanager
def ray_nodes(count: int) -> Iterator[RayNodes]:
    """A cluster of so many nodes with one CPU each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = RayNodes(cluster)
        for _ in range(count - 1):
            nodes.add()
        yield nodes
    finally:
        cluster.shutdown()

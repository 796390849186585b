"""Whole devices for ranks of a role's own, with CPUs of a real Ray in the place of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from megarl.config.schema import ClusterConfig, ParallelConfig
from megarl.controller.cluster import cluster
from megarl.controller.placement import whole
from megarl.errors import RunError


@pytest.mark.slow
def test_ranks_get_whole_devices_or_a_sentence(tmp_path: Path) -> None:
    with cluster(ClusterConfig(object_store_mb=100), tmp_path):
        cpus = int(ray.cluster_resources()["CPU"])
        with pytest.raises(RunError, match="starting the reward model: within 2 s Ray found no room for its .* ranks"):
            whole(ParallelConfig(ranks=cpus + 1, tensor=cpus + 1), "CPU", "reward model", 2.0)
        asked = whole(ParallelConfig(ranks=2, tensor=2), "CPU", "critic", 30.0)
        assert [options["num_cpus"] for options in asked] == [1, 1]
        rank = ray.remote(num_cpus=1)(_Rank)
        ranks = [rank.options(**options).remote() for options in asked]
        assert len(set(ray.get([r.node.remote() for r in ranks], timeout=60))) == 1


class _Rank:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

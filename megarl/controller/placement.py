"""Where ranks are put: what Ray is asked for each of them."""

from __future__ import annotations

from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.schema import ParallelConfig
from megarl.errors import RunError


def options(layout: ParallelConfig, *, shared: bool, name: str, timeout: float) -> list[dict[str, Any]]:
    """Of each rank, in order. The actor's ranks share their GPUs with engines; ranks of a role's own get whole ones (`whole`).
    Without a GPU nothing is asked for on one machine, and a core on several."""
    if not torch.cuda.is_available():
        alone = sum(node["Alive"] for node in ray.nodes()) == 1
        return [{"num_cpus": 0}] * layout.ranks if alone else whole(layout, "CPU", name, timeout)
    if shared:
        return [{"num_gpus": 0.5}] * layout.ranks
    return whole(layout, "GPU", name, timeout)


def whole(layout: ParallelConfig, resource: str, name: str, timeout: float) -> list[dict[str, Any]]:
    """One whole `resource` ("GPU", "CPU") a rank; those of a tensor-parallel group, which are neighbours in Megatron's order, on one
    node. RunError where no node has room for them within `timeout` seconds."""
    count = layout.ranks // layout.tensor
    group = placement_group([{resource: layout.tensor}] * count, strategy="PACK")  # a bundle never spans nodes
    if not ray.wait([group.ready()], timeout=timeout)[0]:
        raise RunError(
            f"starting the {name}: within {timeout:.0f} s Ray found no room for its {layout.ranks} ranks: it needs {count} times "
            f"{layout.tensor} free {resource}s on one node each (a tensor-parallel group is kept inside a node); set "
            f"{name.replace(' ', '_')}.parallel.tensor lower, or give the cluster more {resource}s"
        )
    asked: dict[str, Any] = {"num_gpus": 1} if resource == "GPU" else {"num_cpus": 1}
    return [
        asked | {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank // layout.tensor)}
        for rank in range(layout.ranks)
    ]

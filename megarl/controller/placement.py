"""Where ranks and engines are put: what Ray is asked for each of them.

A pool is some ranks, or the engines that stand apart, and the devices under them: GPUs, or on machines that have none, cores. Ray is
asked for its devices in blocks, each of which lies on one node: a tensor-parallel group, an engine, or both where they share devices.
A rank takes a device of its block; an engine that shares them takes none and is told which GPUs they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import Config
from megarl.controller import pools
from megarl.controller.pools import blocks, engine_size
from megarl.errors import RunError

NAMES = {"GPU": "GPUs", "CPU": "cores"}
Block = tuple[PlacementGroup, int]  # devices on one node: what Ray has lent, and which part of it


@dataclass(frozen=True)
class Place:
    """What Ray is asked for an actor, and what its environment has beside."""

    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """Of every rank of every pool, in order, and of every engine. `nodes`: where the pools lie, in words; empty on one machine."""

    ranks: dict[str, list[Place]]
    engines: list[Place]
    nodes: str = ""


def places_of(cfg: Config) -> Places:
    """On one machine without a GPU nothing is asked for: all take turns on its cores. RunError where the cluster has no room."""
    if on_gpus():
        return placed(cfg, "GPU")
    if _several():
        return placed(cfg, "CPU")
    free = Place({"num_cpus": 0})
    return Places({pool: [free] * layout.ranks for pool, layout in cfg.layouts.items()}, [free] * cfg.rollout.started)


def on_gpus() -> bool:
    """Whether ranks and engines get GPUs; the machine that asks need not have one where there are several."""
    return torch.cuda.is_available() or (_several() and bool(ray.cluster_resources().get("GPU")))


def _several() -> bool:
    return sum(node["Alive"] for node in ray.nodes()) > 1


def placed(cfg: Config, resource: str) -> Places:
    """By devices of a kind, "GPU" or "CPU". RunError where they are not there, or not free within `cluster.worker_timeout`."""
    for fault in _faults(cfg, resource):
        raise RunError(fault)
    cut = blocks(cfg)
    held: dict[str, list[Block]] = {}
    for names in _together(cfg, cut):
        bundles = [(name, {resource: float(size)}) for name in names for size in cut[name]]
        here = cfg.reshard.transport == "colocated" and "actor" in names
        if here:
            bundles[0][1][_this_node()] = 0.001
        group = placement_group([bundle for _, bundle in bundles], strategy="STRICT_PACK" if here else "PACK")
        if not group.wait(cfg.cluster.worker_timeout):
            raise RunError(_taken(cfg, names, cut, resource))
        for at, (name, _) in enumerate(bundles):
            held.setdefault(name, []).append((group, at))
    ranks = {
        pool: [_in(held[pool][rank // cut[pool][0]], resource, 1) for rank in range(layout.ranks)]
        for pool, layout in cfg.layouts.items()
    }
    return Places(ranks, _engines(cfg, cut, held, resource), _nodes(cut, held, resource))


def _engines(cfg: Config, cut: Mapping[str, list[int]], held: Mapping[str, list[Block]], resource: str) -> list[Place]:
    size = engine_size(cfg)
    if "rollout" in cut:
        return [_in(block, resource, size) for block in held["rollout"]]
    block = cut["actor"][0]
    shown = _shown(held["actor"], cut["actor"]) if resource == "GPU" else []
    places = []
    for engine in range(cfg.rollout.started):
        number, first = divmod(engine * size, block)
        own = {"CUDA_VISIBLE_DEVICES": ",".join(shown[number][first : first + size])} if shown else {}
        places.append(Place(_in(held["actor"][number], resource, 0).options, own))
    return places


def _in(block: Block, resource: str, devices: int) -> Place:
    asked = {"num_gpus": devices, "num_cpus": 0} if resource == "GPU" else {"num_cpus": devices}
    return Place(asked | {"scheduling_strategy": PlacementGroupSchedulingStrategy(*block)})


def _shown(held: list[Block], sizes: list[int]) -> list[list[str]]:
    """What the GPUs of each block are called on its node."""
    ask = ray.remote(lambda: [str(gpu) for gpu in ray.get_gpu_ids()])
    return ray.get(
        [ask.options(**_in(block, "GPU", size).options).remote() for block, size in zip(held, sizes, strict=True)]
    )


def _nodes(cut: Mapping[str, list[int]], held: Mapping[str, list[Block]], resource: str) -> str:
    names = {node["NodeID"]: f"node {at} ({node['NodeManagerAddress']})" for at, node in enumerate(ray.nodes())}
    told = []
    for pool, there in held.items():
        counts: Counter[str] = Counter()
        for (group, bundle), size in zip(there, cut[pool], strict=True):
            counts[names[placement_group_table(group)["bundles_to_node_id"][bundle]]] += size
        told.append(f"{pool}: " + ", ".join(f"{count} on {node}" for node, count in counts.items()))
    return f"{NAMES[resource]} of the pools: {'; '.join(told)}" if len(names) > 1 else ""


def _together(cfg: Config, cut: Mapping[str, list[int]]) -> list[list[str]]:
    """Pools that are asked for at one time: with shared memory, actor and engines."""
    joined = ["actor", "rollout"] if cfg.reshard.transport == "colocated" and "rollout" in cut else ["actor"]
    return [joined, *([pool] for pool in cut if pool not in joined)]


def _this_node() -> str:
    """The resource that each node of Ray has of its own, of the one that the run was started on."""
    own = ray.get_runtime_context().get_node_id()
    return next(f"node:{node['NodeManagerAddress']}" for node in ray.nodes() if node["NodeID"] == own)


def _faults(cfg: Config, resource: str) -> Iterator[str]:
    """What no waiting mends."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    devices, name = [int(node.get(resource, 0)) for node in nodes], NAMES[resource]
    yield from pools.too_large(cfg, max(devices), f"a node of this Ray cluster has at most {max(devices)} {name}")
    yield from pools.too_many(
        cfg, sum(devices), f"the {len(nodes)} nodes of this Ray cluster have {sum(devices)} {name}"
    )
    here = max((int(node.get(resource, 0)) for node in nodes if _this_node() in node), default=0)
    yield from pools.not_colocated(cfg, here, f"the node that megarl was started on has {here} {name}")


def _taken(cfg: Config, names: list[str], cut: Mapping[str, list[int]], resource: str) -> str:
    wanted = " and ".join(f"{len(cut[name])} times {cut[name][0]}" for name in names)
    return (
        f"within {cfg.cluster.worker_timeout:.0f} s Ray found no room for the pools {' and '.join(names)}: {wanted} free "
        f"{NAMES[resource]}, each time on one node; other programs may use them, or other pools of this run"
    )

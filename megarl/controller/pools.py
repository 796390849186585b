"""How many devices the pools of a configuration take, and which machines cannot hold them. A device is a GPU, or a core where there
are none."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.config import Config

ENGINES = "rollout.engines*rollout.engine.tp_size"


def engine_size(cfg: Config) -> int:
    """Ranks of an engine."""
    return max(1, int(cfg.rollout.engine.get("tp_size", 1)))


def blocks(cfg: Config) -> dict[str, list[int]]:
    """Devices of every pool, by what has to lie on one node: a tensor-parallel group, an engine, or both where they share devices."""
    size, engines = engine_size(cfg), cfg.rollout.started
    apart = cfg.rollout.pool == "rollout"
    found = {}
    for pool, layout in cfg.layouts.items():
        shares, block, devices = pool == "actor" and not apart, max(1, layout.tensor), max(1, layout.ranks)
        if shares:
            block, devices = math.lcm(block, size), max(devices, engines * size)
        found[pool] = [min(block, devices - start) for start in range(0, devices, block)]
    return found | ({"rollout": [size] * engines} if apart else {})


def devices(cfg: Config) -> int:
    """Of all pools together."""
    return sum(map(sum, blocks(cfg).values()))


def too_many(
    cfg: Config, there: int, machines: str, change: str = "make them fewer, or let pools share"
) -> Iterator[str]:
    """A sentence where `machines`, which have so many devices, are too few."""
    if (wanted := devices(cfg)) > there:
        yield f"{_numbers(cfg)}{'' if len(blocks(cfg)) == 1 else f'={wanted}'} but {machines}; {change}"


def too_large(cfg: Config, there: int, machines: str) -> Iterator[str]:
    """What no node of so many devices can hold in one piece, and is kept inside a node."""
    size, tensor = engine_size(cfg), cfg.actor.parallel.tensor
    for pool, layout in cfg.layouts.items():
        if layout.tensor > there:
            yield (
                f"{pool}.parallel.tensor={layout.tensor}: a tensor-parallel group is kept inside a node, and {machines}; set "
                f"{pool}.parallel.tensor={max(1, there)} or less"
            )
    if size > there:
        yield (
            f"rollout.engine.tp_size={size}: an engine is kept inside a node, and {machines}; set rollout.engine.tp_size="
            f"{max(1, there)} or less"
        )
    elif (both := blocks(cfg)["actor"][0]) > there >= tensor:
        yield (
            f"actor.parallel.tensor={tensor} and rollout.engine.tp_size={size} share devices, of which {both} would have to lie on "
            f"one node, and {machines}; let one divide the other, or set rollout.pool=rollout"
        )


def not_colocated(cfg: Config, there: int, machines: str) -> Iterator[str]:
    """A sentence where weights travel through a node's memory, and actor and engines do not fit on one of so many devices."""
    wanted = sum(sum(sizes) for pool, sizes in blocks(cfg).items() if pool in ("actor", "rollout"))
    if cfg.reshard.transport == "colocated" and wanted > there:
        yield (
            f"reshard.transport=colocated moves weights through one node's memory, where actor and engines take {wanted} devices, and "
            f"{machines}; set reshard.transport=distributed or disk"
        )


def _numbers(cfg: Config) -> str:
    """As "actor.parallel.ranks+critic.parallel.ranks=2+1"."""
    found = {f"{pool}.parallel.ranks": sum(sizes) for pool, sizes in blocks(cfg).items() if pool != "rollout"}
    engines = cfg.rollout.started * engine_size(cfg)
    if cfg.rollout.pool == "rollout":
        found[ENGINES] = engines
    elif engines > cfg.actor.parallel.ranks:
        found = {ENGINES: engines} | {key: number for key, number in found.items() if key != "actor.parallel.ranks"}
    return f"{'+'.join(found)}={'+'.join(map(str, found.values()))}"

"""Whether a run fits, and the smallest change that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from megarl import config
from megarl.config import Config
from megarl.controller import pools, role_checks
from megarl.plan.hardware import GIB, Hardware
from megarl.plan.memory import PHASES, Plan

Change = Mapping[str, Any]  # dotted settings and their values


@dataclass(frozen=True)
class Verdict:
    fits: bool
    sentence: str
    change: dict[str, Any]  # settings that would make it fit; empty: it does, or nothing that was tried would


@dataclass(frozen=True)
class _Over:
    """What is fuller than it can be."""

    needed: int
    room: int
    phase: str
    where: str


def verdict(plan: Plan) -> Verdict:
    """One sentence."""
    over = _fullest(plan)
    if over.needed <= over.room:
        return Verdict(True, f"fits: {over.where} needs {_gib(over.needed)} of {_gib(over.room)} GiB at most", {})
    head = f"does not fit: {over.where} needs {_gib(over.needed)} GiB, and there are {_gib(over.room)}"
    change = _mending(plan)
    if not change:
        return Verdict(
            False, f"{head}; no change of settings that was tried mends it: take more machines, or a smaller model", {}
        )
    return Verdict(False, f"{head}; {' '.join(f'{key}={value}' for key, value in change.items())} would fit", change)


def _fullest(plan: Plan) -> _Over:
    """The fullest device or node, by the share of its room."""
    hardware = plan.hardware
    found = []
    if hardware.gpu:
        load = max(plan.loads, key=lambda one: one.total)
        found.append(_Over(load.total, hardware.usable, load.phase, f"{load.pool} rank {load.rank} in {load.phase}"))
    # Beside GPUs a tenth of a node's memory is left to the system and to processes' libraries.
    room = round(hardware.host_memory_gib * GIB * 0.9) if hardware.gpu else hardware.usable
    phase = max(PHASES, key=plan.node)
    what = "the memory of a node beside its GPUs" if hardware.gpu else "all that runs on a node"
    found.append(_Over(plan.node(phase), room, phase, f"{what} in {phase}"))
    return max(found, key=lambda over: over.needed / over.room)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.3f}"


def _fits(plan: Plan) -> bool:
    over = _fullest(plan)
    return over.needed <= over.room


def _mending(plan: Plan) -> dict[str, Any]:
    """The mildest single change that is enough; else the mildest first ones together, without those that are not needed."""
    taken: dict[str, Any] = {}
    computes = _fullest(plan).phase in ("log-probs", "update")
    smaller, others = list(_less_activations(plan.config)), list(_less_beside(plan.config, plan.hardware))
    changes = smaller + others if computes else others + smaller
    for change in changes:
        if (after := _after(plan, change)) is not None and _fits(after):
            return dict(change)
    for change in changes:
        if _after(plan, {**taken, **change}) is None:
            continue
        taken |= change
        if _fits(_sure(plan, taken)):
            for key in list(taken):
                less = {name: value for name, value in taken.items() if name != key}
                if (after := _after(plan, less)) is not None and _fits(after):
                    taken = less
            return taken
    return {}


def _sure(plan: Plan, change: Change) -> Plan:
    after = _after(plan, change)
    assert after is not None
    return after


def _less_activations(cfg: Config) -> Iterator[Change]:
    """From the mildest."""
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    budget = cfg.actor.micro_batch_tokens
    while budget // 2 >= longest:
        budget //= 2
        yield {"actor.micro_batch_tokens": budget}
    ways = ("none", "selective", "full")
    for way in ways[ways.index(cfg.actor.recompute) + 1 :]:
        yield {"actor.recompute": way}


def _less_beside(cfg: Config, hardware: Hardware) -> Iterator[Change]:
    """Of what else is there, from the mildest; more ranks at last."""
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    if hardware.gpu:
        yield from _moved(cfg)
        fraction = cfg.rollout.engine.get("mem_fraction_static", 0.9)
        for percent in range(int(fraction * 100) // 5 * 5, 5, -5):
            if percent / 100 < fraction:
                yield {"rollout.engine.mem_fraction_static": percent / 100}
        yield {"rollout.engine.tp_size": 2 * int(cfg.rollout.engine.get("tp_size", 1))}
    elif (tokens := cfg.rollout.max_total_tokens) is not None and tokens // 2 >= longest:
        yield {"rollout.max_total_tokens": tokens // 2}
    p = cfg.actor.parallel
    sequence = {"actor.parallel.sequence": True}
    for factor in (2, 4, 8):
        more = {"actor.parallel.ranks": factor * p.ranks}
        more |= {"cluster.nodes": factor * cfg.cluster.nodes} if cfg.cluster.nodes else {}
        yield more
        yield {"actor.parallel.tensor": factor * p.tensor, **sequence, **({} if p.data % factor == 0 else more)}


def _moved(cfg: Config) -> Iterator[Change]:
    sections = {
        "reference": cfg.algorithm.reference,
        "reward_model": cfg.reward_model,
        "critic": cfg.critic,
        "actor": True,
    }
    for kind in ("optimizer", "all"):
        for role, there in sections.items():
            if there and len(cfg.pools[cfg.pool(role)]) > 1:
                yield {f"{role}.offload": kind}


def _after(plan: Plan, change: Change) -> Plan | None:
    """The memory of the run with other settings; None: they cannot be."""
    cfg = deepcopy(plan.config)
    for key, value in change.items():
        *path, name = key.split(".")
        section: Any = cfg
        for part in path:
            section = getattr(section, part)
        if isinstance(section, dict):
            section[name] = value
        else:
            setattr(section, name, value)
    model = plan.surveyed.models["actor"]
    if config.problems(cfg) or list(role_checks.layout_problems("actor.parallel", cfg.actor.parallel, model)):
        return None
    each = plan.hardware.devices
    nodes = cfg.cluster.nodes or plan.surveyed.nodes
    if plan.hardware.gpu:
        wanted = pools.devices(cfg)
        nodes = cfg.cluster.nodes or -(-wanted // each)
        if wanted > nodes * each or [*pools.too_large(cfg, each, ""), *pools.not_colocated(cfg, each, "")]:
            return None
    return Plan(replace(plan.surveyed, config=cfg, nodes=nodes), plan.hardware)

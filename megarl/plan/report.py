"""A plan as a person reads it, and as a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from megarl.bridge.grid import seat
from megarl.controller.pools import engine_size
from megarl.plan.hardware import GIB
from megarl.plan.links import LINKS, Traffic, compute_seconds
from megarl.plan.memory import PHASES, Load, Plan
from megarl.plan.verdict import Verdict

_STATES = ("parameters", "gradients", "optimizer")
_COLUMNS = {
    **{name: name for name in (*_STATES, "activations")},
    "engine": "engine's weights",
    "cache": "KV cache",
    "buffers": "sync buffers",
}


def shown(plan: Plan, sent: Sequence[Traffic], verdict: Verdict) -> str:
    """The whole plan."""
    pools = [*plan.pools, *(["rollout"] if plan.apart and plan.hardware.gpu else [])]
    blocks = ["\n".join(_head(plan)), _roles(plan), *(_phases(plan, pool) for pool in pools)]
    blocks += [_beside(plan), _links(plan, sent)]
    last = [*(f"not yet: {text}" for text in plan.surveyed.cautions), verdict.sentence]
    return "\n\n".join([*blocks, "\n".join(last)])


def as_json(plan: Plan, sent: Sequence[Traffic], verdict: Verdict) -> dict[str, Any]:
    """Bytes, of every rank in every phase."""
    return {
        "hardware": asdict(plan.hardware) | {"nodes": plan.surveyed.nodes},
        "fits": verdict.fits,
        "verdict": verdict.sentence,
        "change": verdict.change,
        "cautions": plan.surveyed.cautions,
        "engine": asdict(plan.engine),
        "node": {phase: plan.node(phase) for phase in PHASES},
        "ranks": [asdict(load) | {"total": load.total} for load in plan.loads],
        "links": [asdict(one) | {"seconds": one.seconds(plan.hardware)} for one in sent],
        "compute_seconds": compute_seconds(plan),
    }


def _head(plan: Plan) -> Iterator[str]:
    cfg, hardware, model = plan.config, plan.hardware, plan.surveyed.models["actor"]
    nodes, r = plan.surveyed.nodes, cfg.rollout
    what = f"{hardware.devices} GPUs of" if hardware.gpu else f"{hardware.devices} cores and"
    yield f"{f'{nodes} x ' if nodes > 1 else ''}{hardware.name}: {what} {hardware.memory_gib:.4g} GiB"
    yield f"{model.family}, {sum(map(prod, model.hf_shapes.values())) / 1e9:.4g} billion parameters, {cfg.model.dtype}"
    for pool, layout in cfg.layouts.items():
        role = next(iter(plan.pools[pool].values()))
        experts = f", expert {layout.expert}" if layout.expert > 1 else ""
        beside = [name for name in plan.pools[pool] if name != pool]
        others = f", with {' and '.join(beside)}" if beside else ""
        yield f"{pool}{others}: {_count(layout.ranks, 'rank')}: {role.layout}{experts}, data {layout.data}"
    where = "apart" if plan.apart else "on the actor's devices"
    engines = f"{_count(r.engines, 'engine')} of {_count(engine_size(cfg), 'rank')}, {where}"
    yield f"rollout: {', '.join(r.urls) or engines}"
    actor = plan.pools["actor"]["actor"]
    yield (
        f"a step: {cfg.data.prompts_per_step * r.n} samples of at most {cfg.data.max_prompt_tokens}+{r.max_new_tokens} tokens; "
        f"a rank has {_count(actor.micro_batches, 'micro-batch', 'es')} of {actor.micro.tokens} tokens in each of "
        f"{_count(cfg.algorithm.mini_batches, 'mini-batch', 'es')}; recompute={cfg.actor.recompute}"
    )


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def _unit(plan: Plan) -> tuple[int, str]:
    """Small models are told in MiB."""
    return (GIB, "GiB") if max(load.total for load in plan.loads) >= GIB else (1 << 20, "MiB")


def ranks_told(plan: Plan, pool: str) -> dict[int, str]:
    """The fullest ranks of the first and of the last stage and of all, and what to call each."""
    peaks: dict[int, int] = {}
    for load in plan.loads:
        if load.pool == pool:
            peaks[load.rank] = max(peaks.get(load.rank, 0), load.total)
    if pool == "rollout":
        return {0: "each"}
    parallel = plan.config.layouts[pool]
    if parallel.ranks == 1:
        return {0: "0"}

    def fullest(ranks: range) -> int:
        return max(ranks, key=lambda rank: peaks[rank])

    each = parallel.ranks // parallel.pipeline
    names = {fullest(range(parallel.ranks)): ["fullest"]}
    if parallel.pipeline > 1:
        names.setdefault(fullest(range(each)), []).append("first stage")
        names.setdefault(fullest(range(parallel.ranks - each, parallel.ranks)), []).append("last stage")
    return {rank: f"{rank} ({', '.join(names[rank])})" for rank in sorted(names)}


def _roles(plan: Plan) -> str:
    """What the roles hold on these ranks while nothing of them is away."""
    unit, name = _unit(plan)
    rows = []
    for pool, roles in plan.pools.items():
        for role in roles.values():
            for rank, label in ranks_told(plan, pool).items():
                place = seat(rank, plan.config.layouts[pool])
                held, stage = role.states(place), role.states.stage(place)
                numbers = [f"{value / unit:.2f}" for value in (*held[:3], held.total)]
                rows.append([role.name, label, f"{stage.elements / 1e6:,.1f} M", *numbers, " ".join(role.leaves)])
    titles = [f"held, {name}", "rank", "elements", *_STATES, "together", "leaves for others"]
    return table(titles if any(row[-1] for row in rows) else titles[:-1], rows)


def _phases(plan: Plan, pool: str) -> str:
    """Phase by phase, on the same ranks."""
    unit, name = _unit(plan)
    columns = {c: title for c, title in _COLUMNS.items() if any(getattr(load, c) for load in plan.loads)}
    labels = ranks_told(plan, pool)
    loads = [load for load in plan.loads if load.pool == pool and load.rank in labels]
    loads.sort(key=lambda load: (PHASES.index(load.phase), load.rank))
    host = any(load.host for load in loads)
    rows = [_row(load, labels[load.rank], columns, unit, host) for load in loads]
    titles = [
        f"{pool}'s ranks, {name}",
        "rank",
        "works",
        *columns.values(),
        "total",
        *(["host memory"] if host else []),
    ]
    return table(titles, rows)


def _row(load: Load, label: str, columns: dict[str, str], unit: int, host: bool) -> list[str]:
    cells = [getattr(load, column) for column in columns] + [load.total] + ([load.host] if host else [])
    return [load.phase, label, load.works, *(f"{cell / unit:.2f}" for cell in cells)]


def _beside(plan: Plan) -> str:
    """The engine's cache, and the memory of a node."""
    hardware, engine = plan.hardware, plan.engine
    unit = GIB if engine.weights >= GIB else 1 << 20
    name = "GiB" if unit == GIB else "MiB"
    sizes = f"weights {engine.weights / unit:.2f} {name}, KV cache {engine.cache / unit:.2f} {name}"
    wanted = f"{engine.tokens} tokens, of {engine.wanted} that it has to sample in a step at their longest"
    lines = [f"a rank of an engine: {sizes} for {wanted}"] if plan.config.rollout.started else []
    if hardware.gpu:
        room = f"of {hardware.host_memory_gib:.0f} GiB"
        lines.append(f"memory of a node beside its GPUs: {_most(plan)} {room}")
    else:
        room = f"of {hardware.memory_gib:.1f} GiB, {hardware.reserved_gib:g} of them left to the system"
        phases = ", ".join(f"{phase} {plan.node(phase) / GIB:.2f}" for phase in PHASES)
        lines.append(f"memory of a node, ranks, engines, libraries and Ray together, GiB: {phases}; {room}")
    return "\n".join(lines)


def _most(plan: Plan) -> str:
    return f"{max(map(plan.node, PHASES)) / GIB:.1f}"


def _links(plan: Plan, sent: Sequence[Traffic]) -> str:
    """What is sent in a step, by the rank that sends most of it."""
    rows = []
    for one in sent:
        cells = [f"{getattr(one, link) / 1e9:.3f}" if getattr(one, link) else "" for link in LINKS]
        seconds = one.seconds(plan.hardware)
        rows.append(
            [one.what, one.role if one.pool == "actor" else f"{one.role} (own ranks)", *cells, f"{seconds:.3g}"]
        )
    titles = ["sent in a step, GB a rank", "by", "inside a node", "between nodes", "to and from memory", "at least, s"]
    time = f"computing of passes and updates: at least {compute_seconds(plan):.3g} s a step at full speed"
    return f"{table(titles, rows)}\n{time}" if rows else time


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Texts to the left, numbers to the right."""
    rows = [row[: len(titles)] for row in rows]
    widths = [max(len(title), *(len(row[at]) for row in rows)) for at, title in enumerate(titles)]
    numeric = [at > 0 and all(_is_number(row[at]) for row in rows) for at in range(len(titles))]

    def line(cells: Sequence[str]) -> str:
        parts = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(titles), *(line(row) for row in rows)])


def _is_number(text: str) -> bool:
    """Also "1,234.5 M", but not "0 (fullest)"."""
    return "(" not in text and (not text or text[0].isdigit())

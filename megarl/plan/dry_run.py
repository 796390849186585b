"""The plan of some ranks beside what Megatron really builds there, without memory and without other ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.bridge.grid import seat
from megarl.bridge.states import Held, Learning, States
from megarl.config.schema import OptimizerConfig, ParallelConfig
from megarl.errors import UserError
from megarl.plan.memory import Plan, Role
from megarl.plan.report import ranks_told, table

_PLAIN = OptimizerConfig()
_LOW = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "cpu_offload")


def dry_run(plan: Plan, ranks: Sequence[int] | None) -> tuple[list[dict[str, Any]], bool]:
    """Builds the actor's ranks that are named (None: those of the report), prints planned and built, and answers with both and
    whether they are equal."""
    layout = plan.config.actor.parallel
    chosen = list(ranks_told(plan, "actor") if ranks is None else dict.fromkeys(ranks))
    if wrong := [rank for rank in chosen if not 0 <= rank < layout.ranks]:
        raise UserError(f"--rank {wrong[0]}: the actor's ranks are 0 to {layout.ranks - 1}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of packages that it finds missing
        found = [_compared(plan, role, layout, rank) for rank in chosen for role in plan.pools["actor"].values()]
    rows = [
        [
            one["role"],
            str(one["rank"]),
            *(f"{one['built'][kind]:,}" for kind in Held._fields[:3]),
            "as planned" if one["equal"] else "planned: " + ", ".join(f"{n:,}" for n in one["planned"].values()),
            f"{one['seconds']:.1f}",
        ]
        for one in found
    ]
    titles = ["built, bytes", "rank", *Held._fields[:3], "", "seconds"]
    print("\n" + table(titles, rows))
    if _reduced(plan):
        print("built with states in float32 and without float8, which need a GPU; planned likewise for this comparison")
    return found, all(one["equal"] for one in found)


def _reduced(plan: Plan) -> bool:
    """Whether there is something that cannot be built without a GPU."""
    actor = plan.config.actor
    low = any(getattr(actor.optimizer, name) != getattr(_PLAIN, name) for name in _LOW)
    return low or (actor.precision.fp8 is not None and actor.precision.fp8_backend != "emulate")


def _compared(plan: Plan, role: Role, layout: ParallelConfig, rank: int) -> dict[str, Any]:
    from megarl.megatron.dry_run import build
    from megarl.megatron.engine import EngineSettings
    from megarl.megatron.precision import PrecisionSettings

    cfg = plan.config
    settings = replace(EngineSettings.of(cfg), precision=PrecisionSettings(cfg.model.dtype))
    optimizer, learning = None, role.states.learning
    if learning is not None:
        section = getattr(cfg, role.name).optimizer
        optimizer = replace(section, **{name: getattr(_PLAIN, name) for name in _LOW})
        learning = Learning.of(optimizer, learning.frozen, fused=learning.fused)
    built = build(role.model, layout, rank, settings, optimizer, steps=learning is None or not learning.fused)
    place = seat(rank, layout)
    if wrong := {n: (v, built.place[n]) for n, v in vars(place).items() if n in built.place and built.place[n] != v}:
        raise RuntimeError(f"rank {rank} stands elsewhere in Megatron's grid: {wrong}")
    held = States(role.model, role.layout, dtype=cfg.model.dtype, learning=learning)(place)
    planned = {kind: getattr(held, kind) for kind in Held._fields[:3]}
    measured = {kind: getattr(built, kind) for kind in planned}
    return {
        "rank": rank,
        "role": role.name,
        "planned": planned,
        "built": measured,
        "equal": planned == measured,
        "seconds": built.seconds,
    }

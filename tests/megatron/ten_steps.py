"""Ten optimizer steps of a policy on the same recorded rollouts, on real ranks and by transformers with torch.optim.

Five epochs over two mini-batches; AdamW with weight decay, clipping, a warm-up and a cosine. What is compared: the gradient norm, the
learning rate and the loss of every step, and in the end every weight, and how far it has moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import denominators
from megarl.batch import Batch
from megarl.config import schema
from tests.megatron.harness import (
    adamw,
    compare,
    cut_otherwise,
    engine_settings,
    joined,
    load_transformers,
    merge_elements,
    random_batch,
    share,
    weights_of,
)
from tests.megatron.layouts import OBJECTIVE, Job, loss_of, scored, with_rollouts

EPOCHS, MINI_BATCHES = 5, 2
STEPS = EPOCHS * MINI_BATCHES
# With a smaller eps an element whose gradient is nearly 0 would move by its sign, which rounding turns.
OPTIMIZER = schema.OptimizerConfig(
    lr=3e-3, min_lr=3e-4, schedule="cosine", warmup_steps=2, weight_decay=0.1, clip_grad=0.5, eps=1e-3
)


@dataclass
class Outcome:
    """How far ten steps are from the reference's, relative: of every step the worst; `moved`: differences of weights divided by how
    far the tensor's fastest element has moved."""

    loss: float
    grad_norm: float
    lr: float
    weights: float
    moved: float
    elements: dict[str, int]


def mini_batches(batch: Batch) -> list[Batch]:
    return [part for _ in range(EPOCHS) for part in batch.split(MINI_BATCHES)]


def learning_rate(step: int) -> float:
    """By the formula of docs/training.md."""
    w, n, m = OPTIMIZER.warmup_steps, STEPS, OPTIMIZER.min_lr
    if step < w:
        return OPTIMIZER.lr * (step + 1) / (w + 1)
    x = torch.tensor((step - w) / (n - w), dtype=torch.float64)
    return float(m + (OPTIMIZER.lr - m) * (1 + torch.cos(torch.pi * x)) / 2)


def reference(folder: Path, file: Path) -> None:
    """The ten steps by transformers, torch's AdamW and torch's clipping."""
    model = load_transformers("CausalLM", folder)
    batch = random_batch(model.config.vocab_size)
    start = {n: t.clone() for n, t in weights_of(model).items()}
    with torch.no_grad():
        batch = with_rollouts(batch, scored(model, batch)[0])
    optimizer = adamw(model, OPTIMIZER)
    losses, norms, rates = [], [], []
    for step, part in enumerate(mini_batches(batch)):
        rates.append(learning_rate(step))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.zero_grad()
        result = loss_of(OBJECTIVE, part, *scored(model, part))
        result.loss.backward()
        losses.append(float(result.loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)))
        optimizer.step()
    weights = weights_of(model)
    moved = {name: float((weights[name] - start[name]).abs().max()) for name in weights}
    found = {"batch": batch, "losses": losses, "norms": norms, "rates": rates, "weights": weights, "moved": moved}
    torch.save(found, file)


def run_jobs(rank: int, world: int, port: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Every job on this rank; Megatron is built up and taken down between them."""
    reports = []
    for job in jobs:
        with joined(rank, world, job.layout, job.port) as place:
            reports.append(_one(place, job))
    return reports


def _one(place: Any, job: Job) -> dict[str, Any]:
    from megarl.megatron.engine import MegatronEngine

    want = torch.load(job.reference, weights_only=False)
    optimizer = schema.OptimizerConfig(**vars(OPTIMIZER) | {"distributed": job.layout.distributed})
    settings = engine_settings(job.layout, job.dtype)
    engine = MegatronEngine(Path(job.folder), place, settings, optimizer=optimizer, total_updates=STEPS)
    cut_otherwise(engine, job.layout)
    metrics = []
    for part in mini_batches(want["batch"]):
        mine = share(part, job.layout, place)
        total = denominators(part.padded("loss_mask"))
        metrics.append(engine.train(part.take(mine), OBJECTIVE, total, temperature=1.0))
    nothing: dict[str, Any] = {"padding": 0.0}

    def weights(scales: dict[str, float] | None) -> dict[str, list]:
        return compare(engine, want["weights"], lambda p: p.detach(), nothing, scales=scales)

    return {"place": place, "metrics": metrics, "weights": weights(None), "moved": weights(want["moved"])}


def outcome(job: Job, ranks: list[dict[str, Any]]) -> Outcome:
    """What the ranks of a job found, as one."""
    want = torch.load(job.reference, weights_only=False)
    primaries = [report["metrics"] for report in ranks if report["place"].primary]

    def worst(name: str, wanted: list[float]) -> float:
        values = [[step[name] for step in report["metrics"]] for report in ranks]
        return max(abs(v - w) / w for row in values for v, w in zip(row, wanted, strict=True))

    losses = [sum(step.get("sum/loss", 0.0) for step in steps) for steps in zip(*primaries, strict=True)]
    largest = max(map(abs, want["losses"]))  # a loss may be near 0
    weights, elements = merge_elements([report["weights"] for report in ranks])
    moved, _ = merge_elements([report["moved"] for report in ranks])
    return Outcome(
        loss=max(abs(a - b) for a, b in zip(losses, want["losses"], strict=True)) / largest,
        grad_norm=worst("grad_norm", want["norms"]),
        lr=worst("lr", want["rates"]),
        weights=max(weights.values()),
        moved=max(moved.values()),
        elements=elements,
    )

"""One training step of a policy on real ranks, job after job in the same processes, each measured against transformers.

What a job computes must depend neither on its layout nor on how its samples are ordered and cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import Objective, denominators
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.batch import Batch, Level
from tests.megatron.harness import (
    OPTIMIZER,
    Layout,
    adamw,
    compare_gradients,
    compare_weights,
    cut_otherwise,
    engine_settings,
    gradients_of,
    joined,
    load_transformers,
    merge_elements,
    optimizer_config,
    random_batch,
    response_rows,
    share,
    weights_of,
)

OBJECTIVE = Objective(clip_low=0.2, clip_high=0.28, clip_dual=3.0, entropy_coefficient=0.01)
# Losses that are compared too, before the step is taken: every aggregation, and a ratio that is of a whole sequence.
OTHERS = {
    **{mode: replace(OBJECTIVE, aggregation=mode) for mode in AGGREGATIONS if mode != "token_mean"},
    "gspo": Objective(policy_loss="gspo", clip_low=0.15, clip_high=0.15, clip_dual=None, entropy_coefficient=0.01),
}


@dataclass(frozen=True)
class Job:
    """One training step of one model on one layout. `reference` is a file that `transformers_reference` wrote."""

    layout: Layout
    folder: str
    reference: str
    port: int
    dtype: str = "float32"
    others: tuple[str, ...] = ()  # of OTHERS
    fp8: str | None = None  # a recipe, emulated


@dataclass
class Outcome:
    """How far a job is from the reference. Distances of tensors are divided by the reference's largest element."""

    log_probs: float = 0.0
    entropy: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    others: dict[str, tuple[float, float]] = field(default_factory=dict)  # of other losses: loss, worst gradient
    gradients: dict[str, float] = field(default_factory=dict)  # by the checkpoint's name, over all ranks' copies
    weights: dict[str, float] = field(default_factory=dict)  # after the step
    elements: dict[str, int] = field(default_factory=dict)  # how many elements the ranks compared, copies counted once
    padding: float = 0.0  # largest |gradient| or |weight| of vocabulary padding
    samples: list[int] = field(default_factory=list)

    @property
    def worst_gradient(self) -> float:
        return max(self.gradients.values())

    @property
    def worst_weight(self) -> float:
        return max(self.weights.values())


def scored(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(R,) log-probs and entropies of the response tokens by transformers, on whole sequences one by one; differentiable."""
    log_probs, entropy = [], []
    for row, prompt in zip(
        batch["tokens"].split(batch.total_lengths.tolist()), batch.prompt_lengths.tolist(), strict=True
    ):
        log_p = torch.log_softmax(model(row[None]).logits[0].float(), dim=-1)[prompt - 1 : -1]
        log_probs.append(log_p.gather(1, row[prompt:, None])[:, 0])
        entropy.append(-(log_p.exp() * log_p).sum(dim=-1))
    return torch.cat(log_probs), torch.cat(entropy)


def with_rollouts(batch: Batch, log_probs: torch.Tensor) -> Batch:
    """With advantages and old log-probs: ratios from below the lower to above the upper clip and beyond the dual one, so that every
    branch of the loss has tokens. Advantages have a mean: else the loss is what is left of terms that cancel, and their rounding is
    all that a relative difference shows."""
    g = torch.Generator().manual_seed(1)
    drift = torch.randn(len(log_probs), generator=g).mul(0.5)
    drift[::11] += 2.0
    batch = batch.set("advantages", torch.randn(len(log_probs), generator=g) + 0.5, Level.RESPONSE)
    return batch.set("old_log_probs", log_probs.detach() - drift, Level.RESPONSE)


def loss_of(objective: Objective, batch: Batch, log_probs: torch.Tensor, entropy: torch.Tensor) -> Any:
    """The objective's result on the whole batch."""
    data = {name: batch.padded(name) for name in ("advantages", "old_log_probs", "loss_mask")}

    def padded(flat: torch.Tensor) -> torch.Tensor:
        return torch.zeros(batch.response_mask.shape).masked_scatter(batch.response_mask, flat)

    return objective(padded(log_probs), padded(entropy), data, denominators(data["loss_mask"]))


def transformers_reference(folder: Path, file: Path) -> None:
    """The same training step by transformers and torch.optim, on whole sequences one by one: log-probs, gradients, new weights."""
    model = load_transformers("CausalLM", folder)
    batch = random_batch(model.config.vocab_size)
    log_probs, entropy = scored(model, batch)
    batch = with_rollouts(batch, log_probs)

    def of(objective: Objective) -> Any:
        model.zero_grad()
        result = loss_of(objective, batch, log_probs, entropy)
        result.loss.backward(retain_graph=True)
        return result

    others = {}
    for name, objective in OTHERS.items():
        found = of(objective)
        clipped = float(found.sums["clip_fraction"])
        others[name] = {"loss": float(found.loss.detach()), "gradients": gradients_of(model), "clipped": clipped}
    result = of(OBJECTIVE)
    found = {
        "batch": batch,
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "loss": float(result.loss.detach()),
        "clipped": float(result.sums["clip_fraction"]),
        "others": others,
        "gradients": gradients_of(model),
    }
    found["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad))
    adamw(model).step()
    torch.save(found | {"weights": weights_of(model)}, file)


def bfloat16_reference(folder: Path, reference: Path) -> Outcome:
    """How far transformers' own bfloat16 is from its float32, on the same rollouts: no optimizer step."""
    want = torch.load(reference, weights_only=False)
    model = load_transformers("CausalLM", folder, torch.bfloat16)
    log_probs, entropy = scored(model, want["batch"])
    result = loss_of(OBJECTIVE, want["batch"], log_probs, entropy)
    result.loss.backward()
    gradients = gradients_of(model)
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    return Outcome(
        log_probs=float((log_probs - want["log_probs"]).abs().max()),
        entropy=float((entropy - want["entropy"]).abs().max()),
        loss=abs(float(result.loss.detach()) - want["loss"]) / abs(want["loss"]),
        grad_norm=abs(norm - want["grad_norm"]) / want["grad_norm"],
        gradients={
            n: float((gradients[n] - g).abs().max() / g.abs().max())
            for n, g in want["gradients"].items()
            if not n.endswith("k_proj.bias")  # whose gradient is 0 but for rounding
        },
    )


def run_jobs(rank: int, world: int, port: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Every job on this rank; Megatron is built up and taken down between them."""
    reports = []
    for job in jobs:
        with joined(rank, world, job.layout, job.port) as place:
            reports.append(_one(place, job))
    return reports


def _one(place: Any, job: Job) -> dict[str, Any]:
    from megarl.megatron.engine import MegatronEngine
    from megarl.megatron.optimizer import UpdateResult
    from megarl.megatron.precision import PrecisionSettings

    layout, want = job.layout, torch.load(job.reference, weights_only=False)
    precision = PrecisionSettings(job.dtype, fp8=job.fp8, fp8_backend="emulate") if job.fp8 else None
    settings = engine_settings(layout, job.dtype, precision=precision)
    optimizer = optimizer_config(layout)
    engine = MegatronEngine(Path(job.folder), place, settings, optimizer=optimizer, total_updates=10)
    cut_otherwise(engine, layout)
    batch: Batch = want["batch"]
    mine = share(batch, layout, place)
    shard = batch.take(mine)
    report: dict[str, Any] = {"place": place, "samples": mine.tolist(), "padding": 0.0}

    scores = engine.log_probs(shard, temperature=1.0)
    if scores is not None and len(mine):
        picked = response_rows(batch, mine)
        report["log_probs"] = float((scores["log_probs"] - want["log_probs"][picked]).abs().max())
        report["entropy"] = float((scores["entropy"] - want["entropy"][picked]).abs().max())

    total = denominators(batch.padded("loss_mask"))
    apply = engine.optimizer.update

    def look(want_gradients: dict[str, torch.Tensor], *, step: bool) -> UpdateResult:
        report["gradients"] = compare_gradients(engine, want_gradients, report)
        return apply() if step else UpdateResult(True, 0.0, 0.0)

    report["others"] = {}
    for name in job.others:
        engine.optimizer.update = partial(look, want["others"][name]["gradients"], step=False)
        loss = engine.train(shard, OTHERS[name], total, temperature=1.0).get("sum/loss", 0.0)
        report["others"][name] = (loss, max(distance for distance, _ in report["gradients"].values()))

    engine.optimizer.update = partial(look, want["gradients"], step=True)
    report["metrics"] = engine.train(shard, OBJECTIVE, total, temperature=1.0)
    report["weights"] = compare_weights(engine, want["weights"], report)
    return report


def outcome(job: Job, ranks: list[dict[str, Any]]) -> Outcome:
    """What the ranks of a job found, as one."""
    want = torch.load(job.reference, weights_only=False)
    primaries = [report for report in ranks if report["place"].primary]

    def loss(wanted: float, values: list[float]) -> float:
        return abs(sum(values) - wanted) / abs(wanted)

    result = Outcome(
        log_probs=max(report.get("log_probs", 0.0) for report in ranks),
        entropy=max(report.get("entropy", 0.0) for report in ranks),
        loss=loss(want["loss"], [report["metrics"].get("sum/loss", 0.0) for report in primaries]),
        grad_norm=max(abs(r["metrics"]["grad_norm"] - want["grad_norm"]) for r in ranks) / want["grad_norm"],
        padding=max(report["padding"] for report in ranks),
        samples=[i for report in primaries for i in report["samples"]],
    )
    result.gradients, result.elements = merge_elements([report["gradients"] for report in ranks])
    result.weights, _ = merge_elements([report["weights"] for report in ranks])
    for name in job.others:
        off = loss(want["others"][name]["loss"], [report["others"][name][0] for report in primaries])
        result.others[name] = (off, max(report["others"][name][1] for report in ranks))
    return result

"""One training step with an exact KL in the loss, on real ranks, measured against transformers' full logits of both models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import Objective, denominators
from megarl.algorithms.divergence import EXACT_KL
from megarl.batch import Batch, Level
from tests.megatron.harness import (
    Layout,
    before_update,
    compare_gradients,
    engine_settings,
    gradients_of,
    joined,
    load_transformers,
    optimizer_config,
    random_batch,
    share,
)
from tests.megatron.layouts import with_rollouts

TEMPERATURE, K = 0.7, 13
KINDS = ("full", "top_k")


def objective(kind: str) -> Objective:
    return Objective(entropy_coefficient=0.01, kl_coefficient=0.8, kl_estimator=kind)


@dataclass(frozen=True)
class Job:
    """`other`: the reference model's folder; `want`: a file that `transformers_reference` wrote, None where both models are one
    and nothing but the KL is learned from."""

    layout: Layout
    kind: str
    folder: str
    other: str
    want: str | None
    port: int
    dtype: str = "float32"


def transformers_reference(
    folder: Path, other: Path, kind: str, file: Path, dtype: torch.dtype = torch.float32, old: Path | None = None
) -> None:
    """Loss and gradients, the KL from both models' whole logits in float64. `old`: such a file whose rollouts are taken."""
    model, reference = (load_transformers("CausalLM", f, dtype) for f in (folder, other))
    batch = random_batch(model.config.vocab_size)
    parts = zip(batch["tokens"].split(batch.total_lengths.tolist()), batch.prompt_lengths.tolist(), strict=True)
    log_probs, entropy, kl = [], [], []
    for row, prompt in parts:
        log_p, log_q = (
            torch.log_softmax(m(row[None]).logits[0, prompt - 1 : -1].double() / TEMPERATURE, -1)
            for m in (model, reference)
        )
        log_probs.append(log_p.gather(1, row[prompt:, None])[:, 0].float())
        entropy.append(-(log_p.exp() * log_p).sum(-1).float())
        if kind == "top_k":
            ids = log_q.topk(K).indices
            rest = torch.ones_like(log_q).scatter(1, ids, 0.0).bool()
            log_p, log_q = (
                torch.cat([x.gather(1, ids), x.masked_fill(~rest, -torch.inf).logsumexp(1, keepdim=True)], 1)
                for x in (log_p, log_q.detach())
            )
        kl.append((log_p.exp() * (log_p - log_q.detach())).sum(-1).float())
    batch = torch.load(old, weights_only=False)["batch"] if old else with_rollouts(batch, torch.cat(log_probs))
    mask = batch.response_mask
    padded = [torch.zeros(mask.shape).masked_scatter(mask, torch.cat(x)) for x in (log_probs, entropy, kl)]
    data = {name: batch.padded(name) for name in ("advantages", "old_log_probs", "loss_mask")} | {"exact_kl": padded[2]}
    result = objective(kind)(padded[0], padded[1], data, denominators(data["loss_mask"]))
    result.loss.backward()
    found = {"batch": batch, "loss": float(result.loss.detach()), "kl": float(result.sums["kl"])}
    torch.save(found | {"gradients": gradients_of(model)}, file)


def run_jobs(rank: int, world: int, port: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Of every job on this rank: `sums` of the update, and how far its gradients are off (`gradients`) or how large (`largest`)."""
    reports = []
    for job in jobs:
        with joined(rank, world, job.layout, job.port) as place:
            reports.append(_one(place, job))
    return reports


def _one(place: Any, job: Job) -> dict[str, Any]:
    from megarl.megatron.engine import MegatronEngine
    from megarl.roles.hosted import Hosted

    settings = engine_settings(job.layout, job.dtype)
    actor = MegatronEngine(Path(job.folder), place, settings, optimizer=optimizer_config(job.layout), total_updates=10)
    reference = MegatronEngine(Path(job.other), place, settings)
    want = torch.load(job.want, weights_only=False) if job.want else None
    batch = want["batch"] if want else still(random_batch(actor.map.dims.vocab))
    shard = batch.take(share(batch, job.layout, place))
    options: dict[str, Any] = {"hidden": True} if job.kind == "full" else {"top_k": K}
    for engine in (actor, reference):
        engine.memory.even_on_cpu = True
    roles = Hosted({"actor": actor, "reference": reference}, {"actor": "all", "reference": "all"})
    with roles.looking("reference"):
        answer = reference.log_probs(shard, temperature=TEMPERATURE, **options)
    if answer is not None:
        for name in EXACT_KL[job.kind]:
            shard = shard.set(name, answer[name.removeprefix("ref_")], Level.RESPONSE)
    report: dict[str, Any] = {"padding": 0.0, "primary": place.primary, "gradients": {}}

    def look() -> None:
        if want:
            report["gradients"] = compare_gradients(actor, want["gradients"], report)
        report["largest"] = max(float(b.grad_data.abs().max()) for chunk in actor.chunks for b in chunk.buffers)

    before_update(actor, look)
    beside = "reference" if job.kind == "full" else None
    with roles.learning("actor", beside):
        assert ("parameters" in reference.memory.away) is (job.kind != "full")
        report["sums"] = actor.train(
            shard,
            Objective(kl_coefficient=0.8, kl_estimator=job.kind) if want is None else objective(job.kind),
            denominators(batch.padded("loss_mask")),
            temperature=TEMPERATURE,
            reference_weight=roles.beside(beside).output_weight() if beside else None,
        )
    return report


def still(batch: Batch) -> Batch:
    """With advantages of 0, from which nothing is learned."""
    size = int(batch.response_lengths.sum())
    return batch.set("advantages", torch.zeros(size), Level.RESPONSE).set(
        "old_log_probs", torch.full((size,), -6.0), Level.RESPONSE
    )

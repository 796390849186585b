"""One training step of a critic or a reward model on real ranks, measured against transformers' own classifiers.

`critic`: values of every response token, the clipped value loss. `reward`: scores of whole sequences, transformers' loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megarl.algorithms import Denominators, ObjectiveResult, denominators
from megarl.algorithms.value_loss import ValueObjective
from megarl.batch import Batch, Level
from tests.megatron.harness import (
    OPTIMIZER,
    Layout,
    adamw,
    before_update,
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

Kind = Literal["critic", "reward"]
OBJECTIVE = ValueObjective(value_clip=0.3, value_aggregation="token_mean")
PAD = 3  # of the tiny models


@dataclass(frozen=True)
class Job:
    kind: Kind
    layout: Layout
    folder: str
    reference: str
    port: int


def sequences(vocabulary: int) -> Batch:
    """Samples of which some end in padding tokens, one has them within, one is nothing else in its response."""
    batch = random_batch(vocabulary)
    tokens = batch["tokens"].clone()
    ends = batch.total_lengths.cumsum(0)
    tokens[ends[3] - 1] = PAD
    tokens[ends[4] - 2 : ends[4]] = PAD
    tokens[ends[6] - batch.response_lengths[6] : ends[6]] = PAD
    tokens[ends[8] - 2] = PAD
    return batch.set("tokens", tokens, Level.SEQUENCE)


class ClassifierLoss:
    """What transformers' sequence classifiers minimise, of samples whose last response token stands for all of them (`closing`):
    the mean over samples of the squared error of one score, of the cross-entropy of several."""

    def __call__(self, values: Tensor, data: dict[str, Tensor], total: Denominators) -> ObjectiveResult:
        counted = data["loss_mask"] > 0
        picked, wanted = values[counted], data["wanted"][counted]
        if values.dim() == 2:
            loss = (picked - wanted).square().sum() / total.tokens
        else:
            loss = torch.nn.functional.cross_entropy(picked, wanted.long(), reduction="sum") / total.tokens
        return ObjectiveResult(loss, {}, {})


def closed(batch: Batch, wanted: Tensor) -> Batch:
    """Training data of a reward model: nothing counts but the place that the score is taken from."""
    from megarl.megatron.valued import closing

    result = closing(batch, PAD)
    size = int(result.response_lengths.sum())
    last = result.response_lengths.cumsum(0) - 1
    mask, target = torch.zeros(size), torch.zeros(size)
    mask[last], target[last] = 1.0, wanted.float()
    return result.set("loss_mask", mask, Level.RESPONSE).set("wanted", target, Level.RESPONSE)


def transformers_reference(kind: Kind, folder: Path, file: Path) -> None:
    """The same step by transformers and torch.optim, on whole sequences one by one."""
    model = load_transformers("SequenceClassification", folder)
    batch = sequences(model.config.vocab_size)
    rows = batch["tokens"].split(batch.total_lengths.tolist())
    g = torch.Generator().manual_seed(5)
    found: dict[str, Any] = {}
    if kind == "critic":
        states = [model.model(row[None]).last_hidden_state[0] for row in rows]
        prompts = batch.prompt_lengths.tolist()
        flat = torch.cat([model.score(s)[p - 1 : -1, 0] for s, p in zip(states, prompts, strict=True)])
        found["values"] = flat.detach()
        batch = batch.set("values", flat.detach() + 0.4 * torch.randn(len(flat), generator=g), Level.RESPONSE)
        # Errors have a mean, so that gradients are not what is left of terms that cancel.
        batch = batch.set("returns", flat.detach() + torch.randn(len(flat), generator=g) + 0.7, Level.RESPONSE)
        data = {name: batch.padded(name) for name in OBJECTIVE.reads}
        whole = torch.zeros(batch.response_mask.shape).masked_scatter(batch.response_mask, flat)
        result = OBJECTIVE(whole, data, denominators(data["loss_mask"]))
        loss, found["clipped"] = result.loss, float(result.sums["value_clip_fraction"])
    else:
        labels = model.config.num_labels
        wanted = torch.randn(len(rows), generator=g) + 0.7 if labels == 1 else torch.arange(len(rows)) % labels
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        lengths = batch.total_lengths[:, None]
        answer = model(padded, attention_mask=(torch.arange(padded.shape[1]) < lengths).long(), labels=wanted)
        loss = answer.loss
        found |= {"scores": answer.logits.detach(), "wanted": wanted}
    loss.backward()
    found["gradients"] = gradients_of(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
    adamw(model).step()
    found |= {"batch": batch, "loss": float(loss.detach()), "grad_norm": float(norm), "weights": weights_of(model)}
    torch.save(found, file)


def run_jobs(rank: int, world: int, port: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Every job on this rank; Megatron is built up and taken down between them."""
    reports = []
    for job in jobs:
        with joined(rank, world, job.layout, job.port) as place:
            reports.append(_one(place, job))
    return reports


def _one(place: Any, job: Job) -> dict[str, Any]:
    from megarl.bridge.head_io import stored_head
    from megarl.megatron.valued import ValueEngine

    layout, want = job.layout, torch.load(job.reference, weights_only=False)
    settings, optimizer = engine_settings(layout), optimizer_config(layout)
    head = stored_head(job.folder)
    assert head is not None
    engine = ValueEngine(Path(job.folder), place, settings, head, optimizer=optimizer, total_updates=10)
    cut_otherwise(engine, layout)
    batch: Batch = want["batch"]
    mine = share(batch, layout, place)
    shard = batch.take(mine)
    report: dict[str, Any] = {"place": place, "samples": mine.tolist(), "padding": 0.0}
    if job.kind == "critic":
        answer, objective, total = engine.values(shard), OBJECTIVE, denominators(batch.padded("loss_mask"))
        expected = want["values"][response_rows(batch, mine)]
        name = "values"
    else:
        answer, objective, total = engine.scores(shard), ClassifierLoss(), Denominators(len(batch), len(batch), 1)
        expected, name = want["scores"][mine], "scores"
        shard = closed(shard, want["wanted"][mine])
    if answer is not None:
        assert answer[name].dtype == torch.float32 and answer[name].shape == expected.shape
        report["outputs"] = float((answer[name] - expected).abs().max()) if len(shard) else 0.0

    def look() -> None:
        report["gradients"] = compare_gradients(engine, want["gradients"], report)

    before_update(engine, look)
    report["metrics"] = engine.train(shard, objective, total)
    report["weights"] = compare_weights(engine, want["weights"], report)
    return report


@dataclass
class Outcome:
    """How far the ranks are from the reference; distances of tensors are divided by the reference's largest element."""

    outputs: float
    loss: float
    grad_norm: float
    worst_gradient: float
    worst_weight: float
    padding: float
    elements: dict[str, int]
    samples: list[int]


def outcome(job: Job, ranks: list[dict[str, Any]]) -> Outcome:
    want = torch.load(job.reference, weights_only=False)
    primaries = [report for report in ranks if report["place"].primary]
    loss = sum(report["metrics"].get("sum/loss", 0.0) for report in primaries)
    gradients, elements = merge_elements([report["gradients"] for report in ranks])
    weights, _ = merge_elements([report["weights"] for report in ranks])
    return Outcome(
        outputs=max(report["outputs"] for report in ranks if "outputs" in report),
        loss=abs(loss - want["loss"]) / abs(want["loss"]),
        grad_norm=max(abs(r["metrics"]["grad_norm"] - want["grad_norm"]) for r in ranks) / want["grad_norm"],
        worst_gradient=max(gradients.values()),
        worst_weight=max(weights.values()),
        padding=max(report["padding"] for report in ranks),
        elements=elements,
        samples=sorted(i for report in primaries for i in report["samples"]),
    )

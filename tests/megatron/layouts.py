"""Small training jobs on real ranks, one after another in the same processes, each measured against transformers.

What a job computes must depend neither on its layout nor on how its samples are ordered and cut. A rank compares what it holds
with the reference itself, so that only numbers travel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import Objective, denominators
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.batch import Batch, Level, Sample
from megarl.batch.packing import prompt_runs
from megarl.batch.plan import balance
from megarl.config import schema
from tests.bridge.cases import one_by_one

OBJECTIVE = Objective(clip_low=0.2, clip_high=0.28, clip_dual=3.0, entropy_coefficient=0.01)
# Losses that are compared too, before the step is taken: every aggregation, and a ratio that is of a whole sequence.
OTHERS = {
    **{mode: replace(OBJECTIVE, aggregation=mode) for mode in AGGREGATIONS if mode != "token_mean"},
    "gspo": Objective(policy_loss="gspo", clip_low=0.15, clip_high=0.15, clip_dual=None, entropy_coefficient=0.01),
}
# A large eps: the first step of AdamW is else the sign of the gradient, which rounding turns where the gradient is nearly 0.
OPTIMIZER = schema.OptimizerConfig(lr=1e-2, eps=1e-2, weight_decay=0.1, clip_grad=0.5)


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    virtual: int = 1
    stage_layers: tuple[int, ...] | None = None
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool = False
    micro_batch_tokens: int = 8192
    share_prompts: bool = True
    recompute: str = "none"
    distributed: bool = True
    chunk: int = 1024
    lopsided: bool = False  # every sample on the first data-parallel rank
    shuffled: bool = False  # samples in another order, so that hardly any two of a prompt lie next to each other

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context


@dataclass(frozen=True)
class Job:
    """One training step of one model on one layout. `reference` is a file that `transformers_reference` wrote."""

    layout: Layout
    folder: str
    reference: str
    port: int
    dtype: str = "float32"
    others: tuple[str, ...] = ()  # of OTHERS


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


def random_batch(vocabulary: int, *, groups: int = 4, n: int = 3, seed: int = 0) -> Batch:
    """Samples of unequal prompts and responses, one response of a single token, one masked whole, some tokens masked."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    samples = []
    for group in range(groups):
        prompt = torch.randint(0, vocabulary, (1 if group == 2 else draw(2, 12),), generator=g).tolist()
        for i in range(n):
            response = torch.randint(0, vocabulary, (1 if (group, i) == (0, 1) else draw(2, 9),), generator=g).tolist()
            mask = [int(draw(0, 5) > 0) for _ in response]
            samples.append(
                Sample(
                    uid=f"p{group}",
                    group=f"p{group}",
                    prompt_ids=prompt,
                    response_ids=response,
                    loss_mask=[0] * len(response) if (group, i) == (1, 2) else mask,
                    rollout_log_probs=[0.0] * len(response),
                    stop_reason="stop",
                    weight_version=0,
                )
            )
    return Batch.from_samples(samples)


def transformers_reference(folder: Path, file: Path) -> None:
    """The same training step by transformers and torch.optim, on whole sequences one by one: log-probs, gradients, new weights."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model.get_input_embeddings().padding_idx = (
        None  # transformers gives the padding token no gradient, though it is read here
    )
    batch = random_batch(model.config.vocab_size)
    log_probs, entropy = [], []
    for row, prompt in zip(
        batch["tokens"].split(batch.total_lengths.tolist()), batch.prompt_lengths.tolist(), strict=True
    ):
        log_p = torch.log_softmax(model(row[None]).logits[0], dim=-1)[prompt - 1 : -1]
        log_probs.append(log_p.gather(1, row[prompt:, None])[:, 0])
        entropy.append(-(log_p.exp() * log_p).sum(dim=-1))
    flat_log_probs, flat_entropy = torch.cat(log_probs), torch.cat(entropy)

    g = torch.Generator().manual_seed(1)
    size = len(flat_log_probs)
    # Ratios from below the lower to above the upper clip and beyond the dual one: every branch of the loss has tokens.
    drift = torch.randn(size, generator=g).mul(0.5)
    drift[::11] += 2.0
    batch = batch.set("advantages", torch.randn(size, generator=g), Level.RESPONSE)
    batch = batch.set("old_log_probs", flat_log_probs.detach() - drift, Level.RESPONSE)
    data = {name: batch.padded(name) for name in ("advantages", "old_log_probs", "loss_mask")}

    def padded(flat: torch.Tensor) -> torch.Tensor:
        return torch.zeros(batch.response_mask.shape).masked_scatter(batch.response_mask, flat)

    parameters = dict(model.named_parameters())

    def of(objective: Objective) -> Any:
        model.zero_grad()
        result = objective(padded(flat_log_probs), padded(flat_entropy), data, denominators(data["loss_mask"]))
        result.loss.backward(retain_graph=True)
        return result

    others = {}
    for name, objective in OTHERS.items():
        found = of(objective)
        learned = one_by_one({n: p.grad.clone() for n, p in parameters.items()}, model.config.model_type)
        clipped = float(found.sums["clip_fraction"])
        others[name] = {"loss": float(found.loss.detach()), "gradients": learned, "clipped": clipped}
    result = of(OBJECTIVE)
    gradients = one_by_one({name: p.grad.clone() for name, p in parameters.items()}, model.config.model_type)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), OPTIMIZER.clip_grad)
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps).step()
    torch.save(
        {
            "batch": batch,
            "log_probs": flat_log_probs.detach(),
            "entropy": flat_entropy.detach(),
            "loss": float(result.loss.detach()),
            "clipped": float(result.sums["clip_fraction"]),
            "grad_norm": float(norm),
            "others": others,
            "gradients": gradients,
            "weights": one_by_one({n: t.clone() for n, t in model.state_dict().items()}, model.config.model_type),
        },
        file,
    )


def run_jobs(rank: int, world: int, port: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Every job on this rank; Megatron is built up and taken down between them."""
    torch.set_num_threads(1)
    return [_one(rank, world, job) for job in jobs]


def _one(rank: int, world: int, job: Job) -> dict[str, Any]:
    from megarl.megatron import parallel
    from megarl.megatron.engine import EngineSettings, MegatronEngine
    from megarl.megatron.optimizer import UpdateResult

    layout, want = job.layout, torch.load(job.reference, weights_only=False)
    place = parallel.start(
        rank,
        world,
        "127.0.0.1",
        job.port,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        virtual=layout.virtual,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        seed=1,
        timeout=120,
    )
    settings = EngineSettings(
        job.dtype,
        layout.sequence,
        layout.recompute,
        layout.micro_batch_tokens,
        layout.chunk,
        layout.share_prompts,
        layout.stage_layers,
    )
    optimizer = schema.OptimizerConfig(**vars(OPTIMIZER) | {"distributed": layout.distributed})
    engine = MegatronEngine(Path(job.folder), place, settings, optimizer=optimizer, total_updates=10)
    batch: Batch = want["batch"]
    mine = _share(batch, layout, place)
    shard = batch.take(mine)
    report: dict[str, Any] = {"place": place, "samples": mine.tolist(), "padding": 0.0}

    scores = engine.log_probs(shard, temperature=1.0)
    if scores is not None and len(mine):
        rows = torch.arange(int(batch.response_lengths.sum())).split(batch.response_lengths.tolist())
        picked = torch.cat([rows[i] for i in mine.tolist()])
        report["log_probs"] = float((scores["log_probs"] - want["log_probs"][picked]).abs().max())
        report["entropy"] = float((scores["entropy"] - want["entropy"][picked]).abs().max())

    total = denominators(batch.padded("loss_mask"))
    apply = engine.optimizer.update
    seen: dict[str, Any] = {}

    def compare(want_gradients: dict[str, torch.Tensor]) -> UpdateResult:
        for chunk in engine.chunks:
            _gather_gradients(chunk, place)
        seen["gradients"] = _compare(engine, place, want_gradients, _gradient, report)
        return UpdateResult(True, 0.0, 0.0)

    report["others"] = {}
    for name in job.others:
        engine.optimizer.update = partial(compare, want["others"][name]["gradients"])
        loss = engine.train(shard, OTHERS[name], total, temperature=1.0).get("sum/loss", 0.0)
        report["others"][name] = (loss, max(distance for distance, _ in seen["gradients"].values()))

    def compare_then_apply() -> UpdateResult:
        compare(want["gradients"])
        return apply()

    engine.optimizer.update = compare_then_apply
    report["metrics"] = engine.train(shard, OBJECTIVE, total, temperature=1.0)
    report["gradients"] = seen["gradients"]
    report["weights"] = _compare(engine, place, want["weights"], lambda p: p.detach(), report)
    parallel.stop()
    return report


def _share(batch: Batch, layout: Layout, place: Any) -> torch.Tensor:
    """Indices of this data-parallel rank's samples, runs of one prompt unbroken."""
    if layout.lopsided:
        return torch.arange(len(batch) if place.data == 0 else 0)
    order = torch.arange(len(batch))
    if layout.shuffled:
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    ordered = batch.take(order)
    lengths, runs = ordered.total_lengths.tolist(), prompt_runs(ordered)
    part = balance([sum(lengths[i] for i in run) for run in runs], place.data_size)[place.data]
    return order[torch.tensor([i for r in part for i in runs[r]], dtype=torch.long)]


def _gradient(parameter: Any) -> torch.Tensor:
    return parameter.main_grad


def _gather_gradients(model: Any, place: Any) -> None:
    """With the distributed optimizer each data-parallel rank has summed only its part of the buffer: put all parts everywhere."""
    from megatron.core import parallel_state as mpu

    if not model.ddp_config.use_distributed_optimizer:
        return
    for groups, peers in (
        (model.bucket_groups, mpu.get_data_parallel_group(with_context_parallel=True)),
        (model.expert_parallel_bucket_groups, mpu.get_expert_data_parallel_group()),
    ):
        sharers = torch.distributed.get_world_size(peers)
        for bucket in (bucket for group in groups for bucket in group.buckets if sharers > 1):
            own = bucket.grad_data.view(sharers, -1)[torch.distributed.get_rank(peers)].clone()
            parts = [torch.empty_like(own) for _ in range(sharers)]
            torch.distributed.all_gather(parts, own, group=peers)
            bucket.grad_data.copy_(torch.cat(parts))


def _compare(
    engine: Any, place: Any, want: dict[str, torch.Tensor], of: Any, report: dict[str, Any]
) -> dict[str, list]:
    """name -> [largest difference / largest element of the reference, elements that this rank answers for]."""
    found: dict[str, list] = defaultdict(lambda: [0.0, 0])
    largest = max(float(tensor.abs().max()) for tensor in want.values())
    for parameter, tensor in engine.parameters():
        if of is _gradient and not isinstance(tensor, torch.nn.Parameter):
            continue
        values = of(tensor).float()
        rest = torch.ones(values.shape, dtype=torch.bool)
        for copy in parameter.copies(place):
            # A key's bias shifts all of a query's scores alike, so its gradient is 0 but for rounding: a scale that is not.
            floor = 1e-2 * largest if copy.hf_name.endswith("k_proj.bias") else 0.0
            scale = max(float(want[copy.hf_name].abs().max()), floor)
            distance = float((values[copy.local] - want[copy.hf_name][copy.hf]).abs().max())
            # Of an expert that no token chose every element is exactly 0.
            distance = distance / scale if scale else math.inf * distance if distance else 0.0
            replica = parameter.replica(place)
            answers = parameter.exported and replica is not None and replica[0] == 0
            entry = found[copy.hf_name]
            entry[0] = max(entry[0], distance) if math.isfinite(distance) else math.inf
            entry[1] += values[copy.local].numel() if answers else 0
            rest[copy.local] = False
        if rest.any():
            report["padding"] = max(report["padding"], float(values[rest].abs().max()))
    return dict(found)


def outcome(job: Job, ranks: list[dict[str, Any]]) -> Outcome:
    """What the ranks of a job found, as one."""
    want = torch.load(job.reference, weights_only=False)
    result = Outcome()
    loss = 0.0
    for report in ranks:
        place = report["place"]
        if place.primary:
            loss += report["metrics"].get("sum/loss", 0.0)
            result.samples += report["samples"]
        result.log_probs = max(result.log_probs, report.get("log_probs", 0.0))
        result.entropy = max(result.entropy, report.get("entropy", 0.0))
        result.padding = max(result.padding, report["padding"])
        norm = report["metrics"]["grad_norm"]
        result.grad_norm = max(result.grad_norm, abs(norm - want["grad_norm"]) / want["grad_norm"])
        for name, (distance, elements) in report["gradients"].items():
            result.gradients[name] = max(result.gradients.get(name, 0.0), distance)
            result.elements[name] = result.elements.get(name, 0) + elements
        for name, (distance, _) in report["weights"].items():
            result.weights[name] = max(result.weights.get(name, 0.0), distance)
    result.loss = abs(loss - want["loss"]) / abs(want["loss"])
    for name in job.others:
        whole, wanted = sum(r["others"][name][0] for r in ranks if r["place"].primary), want["others"][name]["loss"]
        worst = max(r["others"][name][1] for r in ranks)
        result.others[name] = (abs(whole - wanted) / abs(wanted), worst)
    return result

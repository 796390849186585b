"""What all small training jobs on real ranks share: a layout, a batch, an engine on it, and comparisons with transformers.

A rank compares what it holds with the reference itself, so that only numbers travel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.batch import Batch, Sample
from megarl.batch.packing import cut, pack, prompt_runs
from megarl.batch.plan import balance
from megarl.config import schema
from tests.bridge.cases import one_by_one

# A large eps: the first step of AdamW is else the sign of the gradient, which rounding turns where the gradient is nearly 0.
OPTIMIZER = schema.OptimizerConfig(lr=1e-2, eps=1e-2, weight_decay=0.1, clip_grad=0.5)


@dataclass(frozen=True)
class Layout:
    """A parallel layout, and how the samples are ordered and cut. `samples`: so many a micro-batch, whatever their lengths;
    `padding`: rows are filled up to a multiple of so many tokens."""

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
    samples: int | None = None
    padding: int = 1
    share_prompts: bool = True
    recompute: str = "none"
    distributed: bool = True
    chunk: int = 1024
    uneven: bool = False  # a quarter of the samples on the first data-parallel rank, the rest on the last
    lopsided: bool = False  # every sample on the first data-parallel rank
    shuffled: bool = False  # samples in another order, so that hardly any two of a prompt lie next to each other

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context


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


@contextmanager
def joined(rank: int, world: int, layout: Layout, port: int) -> Iterator[Any]:
    """This rank's place in the layout's grid, which is taken down again."""
    from megarl.megatron import parallel

    torch.set_num_threads(1)
    yield parallel.start(
        rank,
        world,
        "127.0.0.1",
        port,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        virtual=layout.virtual,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        seed=1,
        timeout=120,
    )
    parallel.stop()  # after an error the process ends


def engine_settings(layout: Layout, dtype: str = "float32", **more: Any) -> Any:
    """EngineSettings of a layout; `more`: other fields of them."""
    from megarl.megatron.engine import EngineSettings

    return EngineSettings(
        dtype,
        layout.sequence,
        layout.recompute,
        layout.micro_batch_tokens,
        layout.chunk,
        layout.share_prompts,
        layout.stage_layers,
        **more,
    )


def optimizer_config(layout: Layout) -> schema.OptimizerConfig:
    return schema.OptimizerConfig(**vars(OPTIMIZER) | {"distributed": layout.distributed})


def cut_otherwise(engine: Any, layout: Layout) -> None:
    """Cuts that no setting asks for: so many samples a micro-batch, and rows with more padding than they need."""
    from megarl.megatron.schedule import micro_batch_count

    if layout.samples is not None:

        def plan(batch: Batch) -> list[list[int]]:
            parts = [list(part) for part in torch.arange(len(batch)).split(layout.samples)] if len(batch) else []
            parts = [[int(i) for i in part] for part in parts]
            return parts + [[]] * (micro_batch_count(len(parts), engine.place) - len(parts))

        engine._plan = plan
    if layout.padding > 1:

        def padded(micro: Batch) -> Any:
            multiple = layout.padding * (layout.tensor if layout.sequence else 1)
            row = pack(micro, share_prompts=engine.share_prompts, multiple=multiple, context=layout.context)
            return row if layout.context == 1 else cut(row, engine.place.context, layout.context)

        engine._pack = padded


def load_transformers(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a folder; `kind`: the end of its Auto class."""
    import transformers

    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.get_input_embeddings().padding_idx = None  # else the padding token would get no gradient, though it is read
    return model


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies, float32, by the checkpoint's names; zeros where none came."""
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return {n: t.float() for n, t in one_by_one(found, model.config.model_type).items()}


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies, by the checkpoint's names; of tied ones the embedding."""
    tied = ("lm_head.weight",) if model.config.tie_word_embeddings else ()
    found = {n: t.clone() for n, t in model.state_dict().items() if n not in tied}
    return one_by_one(found, model.config.model_type)


def adamw(model: Any, config: schema.OptimizerConfig = OPTIMIZER) -> torch.optim.AdamW:
    """torch's, without decay on norms and biases, though transformers may hold those of all experts in one tensor."""
    decayed: dict[bool, list] = {True: [], False: []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            decayed[p.dim() > 1 and not name.endswith("bias")].append(p)
    groups = [
        {"params": decayed[True], "weight_decay": config.weight_decay},
        {"params": decayed[False], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def before_update(engine: Any, act: Callable[[], Any]) -> Callable[[], Any]:
    """Have `act` called in the engine's training steps when the gradients are summed, before they are applied. Answers what applies
    them."""
    apply = engine.optimizer.update

    def acting() -> Any:
        act()
        return apply()

    engine.optimizer.update = acting
    return apply


def compare_gradients(engine: Any, want: Mapping[str, torch.Tensor], report: dict[str, Any]) -> dict[str, list]:
    for chunk in engine.chunks:
        gather_gradients(chunk)
    return compare(engine, want, gradient, report)


def compare_weights(engine: Any, want: Mapping[str, torch.Tensor], report: dict[str, Any]) -> dict[str, list]:
    return compare(engine, want, lambda p: p.detach(), report)


def gradient(parameter: Any) -> torch.Tensor:
    return parameter.main_grad


def response_rows(batch: Batch, samples: torch.Tensor) -> torch.Tensor:
    """Places of some samples' response tokens among those of the batch."""
    rows = torch.arange(int(batch.response_lengths.sum())).split(batch.response_lengths.tolist())
    return torch.cat([rows[i] for i in samples.tolist()] or [torch.zeros(0, dtype=torch.long)])


def merge_elements(reports: list[dict[str, list]]) -> tuple[dict[str, float], dict[str, int]]:
    """Of the ranks' comparisons: the largest distance of every tensor, and how many of its elements were compared."""
    distances: dict[str, float] = {}
    elements: dict[str, int] = {}
    for report in reports:
        for name, (distance, count) in report.items():
            distances[name] = max(distances.get(name, 0.0), distance)
            elements[name] = elements.get(name, 0) + count
    return distances, elements


def share(batch: Batch, layout: Layout, place: Any) -> torch.Tensor:
    """Indices of this data-parallel rank's samples, runs of one prompt unbroken."""
    if layout.lopsided:
        return torch.arange(len(batch) if place.data == 0 else 0)
    if layout.uneven:
        return torch.arange(len(batch)).tensor_split([len(batch) // 4])[place.data]
    order = torch.arange(len(batch))
    if layout.shuffled:
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    ordered = batch.take(order)
    lengths, runs = ordered.total_lengths.tolist(), prompt_runs(ordered)
    part = balance([sum(lengths[i] for i in run) for run in runs], place.data_size)[place.data]
    return order[torch.tensor([i for r in part for i in runs[r]], dtype=torch.long)]


def gather_gradients(model: Any) -> None:
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


def compare(
    engine: Any,
    want: Mapping[str, torch.Tensor],
    of: Callable,
    report: dict[str, Any],
    *,
    scales: Mapping[str, float] | None = None,
) -> dict[str, list]:
    """name -> [largest difference / largest element of the reference (or `scales` of it), elements this rank answers for]."""
    place = engine.place
    scales = scales or {name: float(tensor.abs().max()) for name, tensor in want.items()}
    found: dict[str, list] = defaultdict(lambda: [0.0, 0])
    largest = max(scales.values())
    for parameter, tensor in engine.parameters():
        if of is gradient and not isinstance(tensor, torch.nn.Parameter):
            continue
        values = of(tensor).float()
        rest = torch.ones(values.shape, dtype=torch.bool)
        for copy in parameter.copies(place):
            # A key's bias shifts all of a query's scores alike, so its gradient is 0 but for rounding: a scale that is not.
            floor = 1e-2 * largest if copy.hf_name.endswith("k_proj.bias") else 0.0
            scale = max(scales[copy.hf_name], floor)
            distance = float((values[copy.local] - copy.of(want[copy.hf_name][copy.hf])).abs().max())
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

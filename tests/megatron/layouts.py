"""One rank of a small training job, for the tables of equal numbers: what it computes must not depend on the layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import Objective, denominators
from megarl.batch import Batch, Level, Sample
from megarl.batch.packing import prompt_runs
from megarl.batch.plan import balance
from megarl.config import schema


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: bool = False
    micro_batch_tokens: int = 8192
    share_prompts: bool = True
    recompute: str = "none"
    distributed: bool = True
    logits_chunk_tokens: int = 7

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data


def random_batch(vocabulary: int, *, groups: int = 3, n: int = 3, seed: int = 0) -> Batch:
    """Samples of unequal prompts and responses, one response of a single token, one masked whole, some tokens masked."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))  # noqa: E731
    samples = []
    for group in range(groups):
        prompt = torch.randint(0, vocabulary, (draw(2, 12),), generator=g).tolist()
        for i in range(n):
            response = torch.randint(0, vocabulary, (1 if i == 1 and group == 0 else draw(2, 9),), generator=g).tolist()
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
                    reward=0.0,
                    payload={},
                )
            )
    batch = Batch.from_samples(samples)
    size = int(batch.response_lengths.sum())
    advantages = torch.randn(size, generator=g)
    old = -3 + 0.3 * torch.randn(size, generator=g)
    return batch.set("advantages", advantages, Level.RESPONSE).set("old_log_probs", old, Level.RESPONSE)


OBJECTIVE = dict(
    policy_loss="vanilla",
    clip_low=0.2,
    clip_high=0.28,
    clip_dual=3.0,
    aggregation="token_mean",
    entropy_coefficient=0.01,
    kl_coefficient=0.0,
    kl_estimator="k3",
)


def one_rank(rank: int, world: int, port: int, folder: str, layout: Layout, batch: Batch, dtype: str, lr: float) -> dict[str, Any]:
    """Log-probs, one training step, and the step's loss and parameters' gradients under the checkpoint's names (this rank's regions)."""
    torch.set_num_threads(1)
    from megarl.megatron import parallel
    from megarl.megatron.engine import EngineSettings, MegatronEngine

    place = parallel.start(rank, world, "127.0.0.1", port, tensor=layout.tensor, pipeline=layout.pipeline, seed=1, timeout=60)
    settings = EngineSettings(
        dtype,
        layout.sequence,
        layout.recompute,
        layout.micro_batch_tokens,
        layout.logits_chunk_tokens,
        layout.share_prompts,
    )
    engine = MegatronEngine(
        Path(folder), place, settings, optimizer=schema.OptimizerConfig(lr=lr, distributed=layout.distributed), total_updates=10
    )
    lengths = batch.total_lengths.tolist()
    runs = prompt_runs(batch)
    share = balance([sum(lengths[i] for i in run) for run in runs], place.data_size)[place.data]
    mine = torch.tensor([i for r in share for i in runs[r]], dtype=torch.long)
    shard = batch.take(mine)
    scores = engine.log_probs(shard, temperature=1.0)
    gradients = {}

    def keep() -> Any:
        for parameter, tensor in engine.parameters():
            whole = tensor.main_grad
            for copy in parameter.copies(place.tensor, place.tensor_size):
                gradients.setdefault((parameter.name, copy.hf_name), []).append((copy.hf, whole[copy.local].clone()))
        return update()

    update, engine.optimizer.update = engine.optimizer.update, keep
    metrics = engine.train(shard, Objective(**OBJECTIVE), denominators(batch.padded("loss_mask")), temperature=1.0)
    weights = {
        (p.name, c.hf_name, str(c.hf)): (c.hf, t.detach()[c.local].clone())
        for p, t in engine.parameters()
        for c in p.copies(place.tensor, place.tensor_size)
    }
    parallel.stop()
    return {
        "place": place,
        "mine": mine,
        "scores": None if scores is None else (scores["log_probs"], scores["entropy"], shard.response_lengths),
        "metrics": metrics,
        "gradients": gradients,
        "weights": weights,
    }

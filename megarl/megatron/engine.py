"""The Megatron engine of one rank: a model stage, forward passes and training steps over a micro-batch plan.

Numbers do not depend on the plan or the layout: losses arrive divided by global denominators, gradients are summed over
micro-batches and data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from megarl.algorithms import Denominators, Objective
from megarl.batch import Batch, Level
from megarl.batch.packing import Packed, pack, plan_runs
from megarl.bridge.model_map import ModelMap, Parameter
from megarl.config import schema
from megarl.megatron import model as stage
from megarl.megatron.head import TokenScores, token_scores
from megarl.megatron.optimizer import Optimizer, data_parallel
from megarl.megatron.parallel import Place, device
from megarl.megatron.specs import uses_transformer_engine

# What a loss may read of a sample, beside the log-probs and entropies of the model in training.
LOSS_FIELDS = ("old_log_probs", "advantages", "loss_mask", "ref_log_probs")


@dataclass(frozen=True)
class EngineSettings:
    """What an engine needs to know of the configuration."""

    dtype: str
    sequence: bool = False
    recompute: str = "none"
    micro_batch_tokens: int = 8192
    logits_chunk_tokens: int = 1024
    share_prompts: bool | None = None

    @classmethod
    def of(cls, config: schema.Config) -> EngineSettings:
        actor = config.actor
        return cls(
            config.model.dtype,
            actor.parallel.sequence,
            actor.recompute,
            actor.micro_batch_tokens,
            actor.logits_chunk_tokens,
            actor.share_prompts,
        )


class MegatronEngine:
    """One rank's part of a model. Without an optimizer it can only look (reference), with one it can learn (actor)."""

    def __init__(
        self,
        folder: Path,
        place: Place,
        settings: EngineSettings,
        *,
        optimizer: schema.OptimizerConfig | None = None,
        total_updates: int = 1,
    ):
        self.map = ModelMap.from_hf(folder)
        self.place = place
        self.settings = settings
        self.share_prompts = not uses_transformer_engine() and settings.share_prompts is not False
        self.config = stage.transformer_config(
            self.map, place, dtype=settings.dtype, sequence=settings.sequence, recompute=settings.recompute
        )
        self.model = stage.build(self.map, place, self.config)
        stage.load_hf(self.model, self.map, folder, place)
        self.optimizer: Optimizer | None = None
        if optimizer is not None:
            # Sharding over a single rank would only copy everything once more.
            sharded = optimizer.distributed and place.data_size > 1
            self.model = data_parallel(self.config, self.model, sharded)
            self.optimizer = Optimizer(self.model, optimizer, settings.dtype, total_updates)
            self.config.grad_scale_func = self.optimizer.inner.scale_loss
        self.config.finalize_model_grads_func = _sum_gradients

    def parameters(self) -> Iterator[tuple[Parameter, torch.Tensor]]:
        """This stage's parameters and the bridge's description of each."""
        return stage.parameters_of(self.model, self.map)

    @torch.no_grad()
    def log_probs(self, batch: Batch, *, temperature: float) -> Batch | None:
        """Log-probs and entropies of the response tokens, as a batch of two RESPONSE fields in the order of `batch`.

        None on ranks whose stage is not the last.
        """
        self.model.eval()
        plan = self._plan(batch)
        results = self._run(batch, plan, partial(self._scores_only, temperature), forward_only=True)
        if not self.place.last_stage:
            return None
        order = torch.tensor([i for part in plan for i in part], dtype=torch.long)
        done = batch.take(order).select([])
        for name in ("log_probs", "entropy"):
            flat = torch.cat([r[name] for r in results]) if results else torch.zeros(0)
            done = done.set(name, flat.cpu(), Level.RESPONSE)
        return done.take(torch.argsort(order))

    def train(
        self, batch: Batch, objective: Objective, denominators: Denominators, *, temperature: float
    ) -> dict[str, float]:
        """One optimizer step on this rank's shard of a mini-batch.

        `batch` needs the RESPONSE fields that the objective reads. Returns `sum/NAME` (to be added over data-parallel ranks) and
        `max/NAME` (to be maximised) of the last stage, and of every rank `grad_norm`, `lr`, `applied`.
        """
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer")
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        loss = partial(self._loss, objective, denominators, temperature)
        results = self._run(batch, self._plan(batch), loss, forward_only=False)
        update = self.optimizer.update()
        metrics: dict[str, float] = {}
        for name, value in ((k, float(v)) for r in results for k, v in r.items()):
            metrics[name] = (
                max(metrics.get(name, value), value) if name.startswith("max/") else metrics.get(name, 0) + value
            )
        return metrics | {"grad_norm": update.grad_norm, "lr": update.lr, "applied": float(update.applied)}

    def _plan(self, batch: Batch) -> list[list[int]]:
        return plan_runs(batch, self.settings.micro_batch_tokens, share_prompts=self.share_prompts)

    def _run(
        self, batch: Batch, plan: list[list[int]], finish: Callable, *, forward_only: bool
    ) -> list[dict[str, Any]]:
        """Drive Megatron's schedule; every layout goes through here. Answers what `finish` made of each micro-batch."""
        if not plan:
            # This rank has no samples, but its gradients take part in the sum over ranks.
            if not forward_only:
                _sum_gradients([self.model])
            return []
        multiple = self.place.tensor_size if self.settings.sequence else 1
        parts = (batch.take(torch.tensor(indices, dtype=torch.long)) for indices in plan)
        packed = ((part, pack(part, share_prompts=self.share_prompts, multiple=multiple)) for part in parts)

        def forward(iterator, model):
            micro, row = next(iterator)
            params = stage.packed_params(row, self.config.params_dtype)
            tokens, positions = row.tokens.to(device())[None], row.positions.to(device())[None]
            hidden = model(tokens, positions, None, packed_seq_params=params)
            return hidden, partial(self._finish, finish, micro, row)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=packed,
            model=self.model,
            num_microbatches=len(plan),
            seq_length=self.settings.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _finish(self, finish: Callable, micro: Batch, row: Packed, hidden: torch.Tensor):
        loss, report = finish(micro, row, hidden)
        return loss, torch.zeros((), dtype=torch.int), report

    def _scores(self, row: Packed, hidden: torch.Tensor, temperature: float) -> TokenScores:
        if self.settings.sequence:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        rows = hidden[:, 0].index_select(0, row.predicts.to(hidden.device))
        return token_scores(
            rows,
            stage.unwrap(self.model).output_weight(),
            row.targets.to(hidden.device),
            vocabulary=self.map.dims.vocab,
            temperature=temperature,
            chunk=self.settings.logits_chunk_tokens,
            group=mpu.get_tensor_model_parallel_group(),
        )

    def _scores_only(self, temperature: float, micro: Batch, row: Packed, hidden: torch.Tensor):
        scores = self._scores(row, hidden, temperature)
        return torch.zeros((), device=hidden.device), {"log_probs": scores.log_probs, "entropy": scores.entropy}

    def _loss(
        self,
        objective: Objective,
        denominators: Denominators,
        temperature: float,
        micro: Batch,
        row: Packed,
        hidden: torch.Tensor,
    ):
        scores = self._scores(row, hidden, temperature)
        data = {name: micro.padded(name).to(hidden.device) for name in LOSS_FIELDS if name in micro}
        flat = micro.response_mask.to(hidden.device)
        result = objective(_pad(scores.log_probs, flat), _pad(scores.entropy, flat), data, denominators)
        report = {f"sum/{k}": v.detach().clone() for k, v in result.sums.items()}
        report |= {f"max/{k}": v.detach().clone() for k, v in result.maxima.items()}
        report["sum/loss"] = result.loss.detach().clone()
        return result.loss, report


def _pad(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(R,) values of the real positions -> (B, T), zero elsewhere; differentiable."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def _sum_gradients(models: list, num_tokens=None, **kwargs) -> None:
    """Megatron's gradient reductions without its division: the loss was already divided by global denominators."""
    finalize_model_grads(models, None, **kwargs)

"""Megatron's optimizer and learning-rate schedule from our settings, and one safe update."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import schema


class UpdateResult(NamedTuple):
    applied: bool  # False: the gradient was not finite and nothing was changed
    grad_norm: float  # L2 norm over all parameters, before clipping
    lr: float  # that this update used


def data_parallel(config: TransformerConfig, model: torch.nn.Module, sharded: bool) -> DistributedDataParallel:
    """Gradients in float32 buffers, summed (never averaged) over the data-parallel ranks; `sharded`: so that each rank ends
    with its part of the sum (distributed optimizer)."""
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded),
        model,
    )


class Optimizer:
    """AdamW with float32 master weights; weight decay spares biases and norms. The schedule counts updates.

    Learning rate at update k (from 0), warm-up w: lr·(k+1)/(w+1) while k < w, then constant, linear or cosine to `min_lr` at
    `total_updates`.
    """

    def __init__(
        self, model: DistributedDataParallel, settings: schema.OptimizerConfig, dtype: str, total_updates: int
    ):
        self.clip = settings.clip_grad
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == "bfloat16",
            params_dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32,
            use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
        )
        self.inner = get_megatron_optimizer(config, [model], config_overrides=get_standard_config_overrides(config))
        if not torch.cuda.is_available():
            for group in self.inner.param_groups:
                group["fused"] = True  # one pass over memory instead of a dozen: three times as fast on CPU
        warmup = settings.warmup_steps
        self.schedule = OptimizerParamScheduler(
            self.inner,
            init_lr=settings.lr / (warmup + 1),
            max_lr=settings.lr,
            min_lr=settings.min_lr if settings.schedule != "constant" else settings.lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(total_updates, warmup + 1),
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=max(total_updates, 1),
            wd_incr_style="constant",
        )

    @property
    def lr(self) -> float:
        return float(max(group["lr"] for group in self.inner.param_groups))

    @torch.no_grad()
    def update(self) -> UpdateResult:
        """Clip the accumulated gradient to the global norm and apply it; a gradient with NaN or inf in it is not applied."""
        lr = self.lr
        overflow = self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if overflow or not math.isfinite(norm):
            self.schedule.step(1)
            return UpdateResult(False, norm, lr)
        if self.clip > 0:
            for part in getattr(self.inner, "chained_optimizers", [self.inner]):
                parameters = part.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, max_norm=self.clip, total_norm=norm)
        applied = bool(self.inner.step_with_ready_grads())
        self.schedule.step(1)
        return UpdateResult(applied, norm, lr)

"""Megatron's optimizer and learning-rate schedule from our settings, and one safe update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.bridge.model_map import ModelMap, Parameter
from megarl.errors import ConfigError
from megarl.megatron import parameter_groups
from megarl.megatron.optimizer_settings import DTYPES, STATE_DTYPES, OptimizerSettings, problems


class UpdateResult(NamedTuple):
    applied: bool  # False: the gradient was not finite and nothing was changed
    grad_norm: float  # L2 norm over all parameters, before clipping
    lr: float  # that this update used, before multipliers


def learning(
    chunks: Sequence[torch.nn.Module],
    parameters: Iterable[tuple[Parameter, torch.Tensor]],
    model_map: ModelMap,
    config: TransformerConfig,
    settings: Any,
    *,
    dtype: str,
    ranks: int,
    total_updates: int,
    fp8_params: bool = False,
) -> tuple[list[DistributedDataParallel], Optimizer]:
    """Make a loaded model one that learns: freeze what the settings freeze, put gradients into buffers, build the optimizer.

    Args:
        chunks: this rank's model chunks, in order.
        parameters: all their parameters with the bridge's description of each.
        settings: `OptimizerSettings`, or the section of the configuration.
        ranks: how many ranks share gradients (data parallel × context parallel).

    Raises ConfigError with every sentence of `problems`.
    """
    settings = OptimizerSettings.of(settings)
    found = problems(settings, dtype=dtype, total_updates=total_updates)
    if found or (found := parameter_groups.problems(model_map, settings.frozen, settings.lr_multipliers)):
        raise ConfigError(found)
    frozen = parameter_groups.frozen(model_map, settings.frozen)
    scales = parameter_groups.lr_scales(model_map, settings.lr_multipliers, settings.layer_lr_decay)
    scale_of = {}
    for parameter, tensor in parameters:
        if parameter.name in frozen:
            tensor.requires_grad_(
                False
            )  # before the buffers are made: it gets no place in them, and no optimizer state
        else:
            scale_of[tensor] = scales[parameter.name]
    if frozen and config.recompute_granularity == "full":
        _keep_recomputed_gradients(chunks)
    wrapped = [
        data_parallel(
            config,
            chunk,
            settings.sharded(ranks),
            float32_gradients=settings.main_grads_dtype == "float32",
            fp8_params=fp8_params,
            first=index == 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    return wrapped, Optimizer(wrapped, settings, dtype, total_updates, scale_of=scale_of, fp8_recipe=_recipe(config))


def _keep_recomputed_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Megatron's recomputation asks a layer's input, not its parameters, whether there is a gradient to compute. Behind a frozen
    embedding no input would say so, and the layers' gradients would silently be zero."""

    def ask(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, LanguageModelEmbedding):
                module.register_forward_hook(ask)


def data_parallel(
    config: TransformerConfig,
    model: torch.nn.Module,
    sharded: bool,
    *,
    float32_gradients: bool = True,
    fp8_params: bool = False,
    first: bool = True,
) -> DistributedDataParallel:
    """Gradients in buffers (float32 unless told otherwise), summed (never averaged) over the data-parallel ranks; `sharded`: so
    that each rank ends with its part of the sum (distributed optimizer). `first`: the first chunk of the rank."""
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=float32_gradients, use_distributed_optimizer=sharded, fp8_param_gather=fp8_params
        ),
        model,
        disable_bucketing=not first,
    )


class Optimizer:
    """AdamW with float32 master weights; weight decay spares biases and norms. The schedule counts updates.

    Learning rate at update k (from 0) of N, warm-up w: lr·(k+1)/(w+1) while k < w, then constant, or with m = min_lr:

        linear    m + (lr - m)·(1 - x)                     x = (k - w) / (N - w)
        cosine    m + (lr - m)·(1 + cos πx) / 2
        wsd       lr until update N - d, then m + (lr - m)·f(y), y = (k - N + d) / d, over the last d updates; f is
                  1 - y (linear), (1 + cos πy)/2 (cosine), 2·0.5^y - 1 (exponential), 1 - √y (minus_sqrt)
                  (warm-up, stable, decay: arXiv:2404.06395, sec. 4)

    times the parameter's own factor (`scale_of`, by tensor; missing: 1).
    """

    def __init__(
        self,
        models: DistributedDataParallel | Sequence[DistributedDataParallel],
        settings: Any,
        dtype: str,
        total_updates: int,
        *,
        scale_of: Mapping[torch.Tensor, float] | None = None,
        fp8_recipe: str | None = None,
    ):
        chunks = [models] if isinstance(models, DistributedDataParallel) else list(models)
        settings = OptimizerSettings.of(settings)
        self.clip = settings.clip_grad
        config = OptimizerConfig(
            **megatron_fields(settings, dtype, chunks[0].ddp_config.use_distributed_optimizer, fp8_recipe)
        )
        overrides = get_standard_config_overrides(config) | _scale_overrides(scale_of or {})
        self.inner = get_megatron_optimizer(config, chunks, config_overrides=overrides)
        if not torch.cuda.is_available():
            for group in self.inner.param_groups:
                group["fused"] = True  # one pass over memory instead of a dozen: three times as fast on CPU
        self.schedule = _schedule(self.inner, settings, total_updates)

    @property
    def lr(self) -> float:
        """Of the next update, before multipliers."""
        return float(self.schedule.get_lr({}))

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
                    clip_grad_by_total_norm_fp32(
                        parameters,
                        max_norm=self.clip,
                        total_norm=norm,
                        use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                    )
        applied = bool(self.inner.step_with_ready_grads())
        self.schedule.step(1)
        return UpdateResult(applied, norm, lr)


def megatron_fields(
    settings: OptimizerSettings, dtype: str, sharded: bool, fp8_recipe: str | None = None
) -> dict[str, Any]:
    """Arguments of Megatron's OptimizerConfig."""
    result: dict[str, Any] = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.beta1,
        "adam_beta2": settings.beta2,
        "adam_eps": settings.eps,
        "clip_grad": settings.clip_grad,
        "bf16": dtype == "bfloat16",
        "params_dtype": DTYPES[dtype],
        "use_distributed_optimizer": sharded,
        "fp8_recipe": fp8_recipe,
    }
    if settings.precision_aware:
        result["use_precision_aware_optimizer"] = True
        result |= {name: DTYPES[getattr(settings, name)] for name in STATE_DTYPES}
    if settings.cpu_offload > 0:
        result |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": settings.cpu_offload,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    return result


class _Schedule(OptimizerParamScheduler):
    """Megatron's schedule, times the group's factor also in the warm-up (Megatron starts every group's at the same rate)."""

    def get_lr(self, param_group: dict) -> float:
        return float(param_group.get("lr_mult", 1.0) * super().get_lr({}))


def _schedule(inner: Any, settings: OptimizerSettings, total_updates: int) -> _Schedule:
    warmup = settings.warmup_steps
    wsd = settings.schedule == "wsd"
    return _Schedule(
        inner,
        init_lr=settings.lr / (warmup + 1),
        max_lr=settings.lr,
        min_lr=settings.min_lr if settings.schedule != "constant" else settings.lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(total_updates, warmup + 1),
        lr_decay_style="WSD" if wsd else settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=max(total_updates, 1),
        wd_incr_style="constant",
        wsd_decay_steps=settings.decay_steps(total_updates) if wsd else None,
        lr_wsd_decay_style=settings.wsd_decay if wsd else None,
    )


def _scale_overrides(scale_of: Mapping[torch.Tensor, float]) -> dict[ParamKey, dict[str, float]]:
    """A parameter group for each factor. `lr_mult` is one of the names by which a checkpoint tells groups apart."""

    def key(scale: float) -> ParamKey:
        return ParamKey(predicate=ParamPredicate(f"lr times {scale!r}", lambda tensor: scale_of.get(tensor) == scale))

    return {key(scale): {"lr_mult": scale} for scale in sorted(set(scale_of.values())) if scale != 1.0}


def _recipe(config: TransformerConfig) -> str | None:
    return config.fp8_recipe if config.fp8 else None

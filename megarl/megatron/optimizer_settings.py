"""What an optimizer is asked to be, and what of that cannot work. Knows no Megatron, so that a check can ask before ranks start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from megarl.megatron.precision import Machine

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.uint8,  # Transformer Engine's FusedAdam holds float8 as bytes with one scale a tensor
}
# What FusedAdam takes (transformer_engine/pytorch/optimizers/fused_adam.py), and Megatron for the gradients.
STATE_DTYPES = {
    "main_params_dtype": ("float32", "float16"),
    "main_grads_dtype": ("float32", "bfloat16"),
    "exp_avg_dtype": ("float32", "bfloat16", "float16", "float8"),
    "exp_avg_sq_dtype": ("float32", "bfloat16", "float16", "float8"),
}


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, its schedule, its parameter groups, and where and how finely its states are kept."""

    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: str = "constant"  # constant, linear, cosine, wsd
    warmup_steps: int = 0
    wsd_decay_steps: int | None = None  # wsd: the last updates, in which the learning rate falls; None: a tenth of all
    wsd_decay: str = "linear"  # wsd: how it falls: linear, cosine, exponential, minus_sqrt
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = True
    frozen: Sequence[str] = ()
    lr_multipliers: Mapping[str, float] = field(default_factory=dict)
    layer_lr_decay: float = 1.0
    main_params_dtype: str = "float32"
    main_grads_dtype: str = "float32"
    exp_avg_dtype: str = "float32"
    exp_avg_sq_dtype: str = "float32"
    cpu_offload: float = 0.0  # the part of the parameters whose states live, and whose update runs, on the CPU

    @classmethod
    def of(cls, settings: Any) -> OptimizerSettings:
        """From the configuration's section, by the names of its fields; a field that it lacks keeps its default."""
        known = {f.name: getattr(settings, f.name) for f in fields(cls) if hasattr(settings, f.name)}
        return cls(**known)

    @property
    def precision_aware(self) -> bool:
        """Whether Megatron's precision-aware optimizer is asked for; its code also carries the CPU offload."""
        return self.cpu_offload > 0 or any(getattr(self, name) != "float32" for name in STATE_DTYPES)

    def sharded(self, ranks: int) -> bool:
        """Whether states are sharded over the `ranks` that share gradients. Over a single one that would only copy everything
        once more, but the precision-aware optimizer exists in no other form."""
        return self.precision_aware or (self.distributed and ranks > 1)

    def decay_steps(self, total_updates: int) -> int:
        """Updates in which WSD's learning rate falls."""
        return max(1, total_updates // 10) if self.wsd_decay_steps is None else self.wsd_decay_steps


def problems(
    settings: OptimizerSettings,
    *,
    dtype: str,
    total_updates: int,
    where: str = "actor.optimizer",
    cuda: bool | None = None,
    fused_adam: bool | None = None,
) -> list[str]:
    """What cannot work, a sentence each with what would; empty: nothing. `cuda`, `fused_adam` None: as this machine is.

    Everything in float32 runs anywhere. States below float32 need Transformer Engine's FusedAdam, which needs CUDA. The CPU
    offload needs CUDA, because on a machine without it the states are in CPU memory already (Megatron's
    HybridDeviceOptimizer then has nothing to copy from and fails in its first step), and Transformer Engine, because Megatron
    has it as a part of the precision-aware optimizer.
    """
    cuda = torch.cuda.is_available() if cuda is None else cuda
    fused_adam = has_fused_adam() if fused_adam is None else fused_adam
    found = []
    room, decay = total_updates - settings.warmup_steps, settings.decay_steps(total_updates)
    if settings.schedule == "wsd" and decay > room:
        found.append(
            f"{where}.wsd_decay_steps is {decay}, but of {total_updates} updates only {max(room, 0)} follow the "
            f"{settings.warmup_steps} of the warm-up; set it to at most {max(room, 0)} or shorten the warm-up"
        )
    for name, legal in STATE_DTYPES.items():
        value = getattr(settings, name)
        if value not in legal:
            found.append(f"{where}.{name} is {value}; it must be one of {', '.join(legal)}")
    if settings.main_params_dtype != "float32" and dtype == "float32":
        found.append(
            f"{where}.main_params_dtype={settings.main_params_dtype} is about the master copies of bfloat16 weights, and "
            f"model.dtype=float32 has none; set it to float32"
        )
    if not settings.precision_aware:
        return found
    low = [f"{where}.{name}={getattr(settings, name)}" for name in STATE_DTYPES if getattr(settings, name) != "float32"]
    if settings.cpu_offload > 0 and low:
        found.append(
            f"{where}.cpu_offload keeps the optimizer states of the CPU in float32, so it excludes {', '.join(low)}; "
            f"set one or the other"
        )
    if settings.cpu_offload > 0 and not cuda:
        found.append(
            f"{where}.cpu_offload={settings.cpu_offload:g} moves optimizer states from a GPU to CPU memory, and this machine "
            f"has no CUDA: they are in CPU memory already; set it to 0"
        )
    elif settings.cpu_offload > 0 and not fused_adam:
        found.append(
            f"{where}.cpu_offload={settings.cpu_offload:g} is part of Megatron's precision-aware optimizer, which needs "
            f"Transformer Engine 2.1 or newer; install it, or set cpu_offload to 0"
        )
    if low and not (cuda and fused_adam):
        lack = "no CUDA" if not cuda else "no Transformer Engine (2.1 or newer)"
        found.append(
            f"{', '.join(low)} needs Transformer Engine's FusedAdam on a GPU, and this machine has {lack}; set float32, "
            f"which runs everywhere"
        )
    return found


def has_fused_adam() -> bool:
    """Whether Transformer Engine is installed with an Adam of low-precision states."""
    version = Machine.here().transformer_engine
    return version is not None and version >= (2, 1)

"""Float8 training emulated: the inputs of the transformer layers' matrix products are rounded to float8 and back.

For studying a recipe's numerics on any machine. It is no faster and saves no memory, and whatever shows its results calls
them "emulated". Rounded are, as Transformer Engine does it (x the activations, w the weight, g the gradient of the output):

    y  = q(x) q(w)^T        dx = q(g) q(w)        dw = q(g)^T q(x)

with q(v) = float8(s v) / s, s a scale that brings the largest magnitude of a piece of the tensor to the format's largest
number (448 in e4m3, 57344 in e5m2). Pieces are the whole tensor (tensorwise, delayed), or blocks along the dimension that a
product sums over (blockwise, mxfp8); x and g are therefore rounded anew, from their unrounded values, for each of their two
products. Products are summed in float32 and rounded once.

Where a rank holds a part of a tensor, the scale of the whole tensor is that of all parts: magnitudes are compared over the
tensor- and context-parallel ranks, so that per-tensor recipes do not depend on the layout. (Transformer Engine compares them
only where sequence parallelism gathers a tensor.) Blocks that a split cuts through do depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megarl.megatron.precision import PrecisionSettings

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST_SCALE = 2.0**127


def quantize(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """float32 values that x has after a cast to float8 at `scale` and back. Magnitudes beyond the format saturate, as they do
    in Transformer Engine's casts; NaN stays NaN."""
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype).float() / scale


def scale_of(amax: torch.Tensor, dtype: torch.dtype, *, margin: int = 0, power_of_two: bool = False) -> torch.Tensor:
    """float32 scale that brings `amax` to the format's largest number, over 2^margin; with `power_of_two` the next power below.

    1 where there is nothing to scale: amax 0, inf or NaN.
    """
    scale = torch.finfo(dtype).max / amax.float() / 2.0**margin
    if power_of_two:
        # x = m 2^e with 1/2 <= m < 1, so 2^(e - 1) is the largest power of two that is not above x
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale.clamp(max=_LARGEST_SCALE)).exponent - 1)
    scale = scale.clamp(max=_LARGEST_SCALE)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def quantize_blocks(x_RC: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """`quantize` with a power-of-two scale for each block of (rows, columns); blocks at the edges may be smaller."""
    rows, columns = x_RC.shape
    height, width = block
    padded = F.pad(x_RC.float(), (0, -columns % width, 0, -rows % height))
    tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    scale = scale_of(tiles.abs().amax(dim=(1, 3), keepdim=True), dtype, power_of_two=True)
    return quantize(tiles, scale, dtype).view(padded.shape)[:rows, :columns]


@dataclass
class Delayed:
    """The scale of one tensor from earlier passes: of the last `history` largest magnitudes the largest, or the last one."""

    dtype: torch.dtype
    history: int
    use: str  # "max" or "most_recent"
    margin: int
    amaxes: torch.Tensor | None = None  # (history,) newest first; None: no pass yet

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """At which x is rounded now; 1 before anything was seen."""
        if self.amaxes is None:
            return x.new_ones((), dtype=torch.float32)
        amax = self.amaxes.max() if self.use == "max" else self.amaxes[0]
        return scale_of(amax, self.dtype, margin=self.margin)

    def saw(self, amax: torch.Tensor) -> None:
        before = amax.new_zeros(0) if self.amaxes is None else self.amaxes
        self.amaxes = torch.cat([amax.float().reshape(1), before])[: self.history]


@dataclass
class Rounding:
    """How one linear module rounds its inputs. `sums over` names a dimension of a 2-D tensor: 0 rows, 1 columns."""

    recipe: str
    forward: torch.dtype
    backward: torch.dtype
    groups: tuple[Any, ...] = ()  # over all of these, one after another, magnitudes are compared
    delayed: dict[str, Delayed] = field(default_factory=dict)  # "input", "weight", "gradient"

    def dtype(self, kind: str) -> torch.dtype:
        return self.backward if kind == "gradient" else self.forward

    def tensor_scale(self, x: torch.Tensor, kind: str, *, remember: bool) -> torch.Tensor | None:
        """The one scale of a tensor, None for recipes of blocks. `remember`: this pass counts for later ones."""
        if self.recipe not in ("tensorwise", "delayed"):
            return None
        state = self.delayed.get(kind)
        amax = None
        if state is None or remember:
            amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
            for group in self.groups:
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        if state is None:
            return scale_of(amax, self.dtype(kind))
        scale = state.scale(x)
        if remember:
            state.saw(amax)
        return scale

    def rounded(self, x: torch.Tensor, kind: str, scale: torch.Tensor | None, sums_over: int) -> torch.Tensor:
        """float32 values that the product sees."""
        dtype = self.dtype(kind)
        if scale is not None:
            return quantize(x, scale, dtype)
        if self.recipe == "blockwise" and kind == "weight":
            return quantize_blocks(x, (128, 128), dtype)
        size = 128 if self.recipe == "blockwise" else 32
        return quantize_blocks(x, (1, size) if sums_over == 1 else (size, 1), dtype)


class _Product(torch.autograd.Function):
    """(N, K) activations, (M, K) weight -> (N, M), all three products of rounded inputs."""

    @staticmethod
    def forward(ctx, x, weight, rounding, remember):
        x_scale = rounding.tensor_scale(x, "input", remember=remember)
        w_scale = rounding.tensor_scale(weight, "weight", remember=remember)
        ctx.save_for_backward(x, weight)
        ctx.rest = (rounding, x_scale, w_scale)
        rows = rounding.rounded(x, "input", x_scale, 1)
        return (rows @ rounding.rounded(weight, "weight", w_scale, 1).t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rounding, x_scale, w_scale = ctx.rest
        g_scale = rounding.tensor_scale(grad, "gradient", remember=True)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            rows = rounding.rounded(grad, "gradient", g_scale, 1)
            grad_x = (rows @ rounding.rounded(weight, "weight", w_scale, 0)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            columns = rounding.rounded(grad, "gradient", g_scale, 0)
            grad_weight = (columns.t() @ rounding.rounded(x, "input", x_scale, 0)).to(weight.dtype)
        return grad_x, grad_weight, None, None


@dataclass
class Emulation:
    """What was put around a model's modules."""

    label: str
    modules: dict[str, Rounding]  # by the module's name in the model

    def state(self) -> dict[str, torch.Tensor]:
        """Magnitudes of earlier passes (delayed), for a checkpoint; empty for other recipes."""
        return {
            f"{name}.{kind}": state.amaxes
            for name, rounding in self.modules.items()
            for kind, state in rounding.delayed.items()
            if state.amaxes is not None
        }

    def load_state(self, saved: dict[str, torch.Tensor]) -> None:
        for name, rounding in self.modules.items():
            for kind, state in rounding.delayed.items():
                state.amaxes = saved.get(f"{name}.{kind}")


def emulate_fp8(model: torch.nn.Module, settings: PrecisionSettings) -> Emulation:
    """Let the linear modules of a built model's transformer layers compute as the recipe does; in place.

    Layers that the settings keep in bfloat16 are left alone, and so are embedding, output layer and routers; a stage that has no
    other layers gets an emulation of no modules. Raises ValueError where nothing is to be emulated, or layers are not local ones.
    """
    if not settings.emulated:
        raise ValueError(f"emulate_fp8 needs settings with fp8_backend=emulate, and these are {settings.label}")
    linear = dict(_linear_modules(model))
    if not linear and any(hasattr(module, "layer_number") for module in model.modules()):
        raise ValueError(
            "emulate_fp8 needs layers of Megatron's local spec, and this model has none of its linear modules"
        )
    found = {}
    for name, module in linear.items():
        if not settings.in_bf16(_layer_of(model, name), module.config.num_layers):
            found[name] = _rounding(settings, module)
            module._forward_impl = _forward(module, found[name])
    return Emulation(settings.label, found)


def _linear_modules(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and "layers." in name:
            yield name, module


def _layer_of(model: torch.nn.Module, name: str) -> int:
    """Number, from 0 over the whole model, of the transformer layer that a module lies in."""
    parts = name.split(".")
    layer = model.get_submodule(".".join(parts[: parts.index("layers") + 2]))
    return int(layer.layer_number) - 1


def _rounding(settings: PrecisionSettings, module: Any) -> Rounding:
    backward = E5M2 if settings.format == "hybrid" else E4M3
    delayed = {}
    if settings.fp8 == "delayed":
        delayed = {
            kind: Delayed(dtype, settings.fp8_history, settings.fp8_history_use, settings.fp8_margin)
            for kind, dtype in (("input", E4M3), ("weight", E4M3), ("gradient", backward))
        }
    groups = [module.tp_group]
    if not module.is_expert:
        groups.append(mpu.get_context_parallel_group())
    return Rounding(str(settings.fp8), E4M3, backward, tuple(g for g in groups if dist.get_world_size(g) > 1), delayed)


def _forward(module: Any, rounding: Rounding):
    """What takes the place of the module's `_forward_impl`; with the same arguments, by keyword."""

    def forward(input, weight, bias=None, allreduce_dgrad=False, sequence_parallel=False, **_):  # noqa: A002
        if sequence_parallel:
            x = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=module.tp_group)
        elif allreduce_dgrad:
            x = copy_to_tensor_model_parallel_region(input, group=module.tp_group)
        else:
            x = input
        # A pass without gradients looks ahead (recomputation) or aside (log-probs): it must not change later scales.
        remember = module.training and torch.is_grad_enabled()
        y = _Product.apply(x.reshape(-1, x.shape[-1]), weight, rounding, remember)
        y = y.view(*x.shape[:-1], len(weight))
        return y if bias is None else y + bias

    return forward

"""In which numbers a model computes: float32, bfloat16 (with float32 master weights), and float8 on top of bfloat16.

What a recipe means, by Transformer Engine's own definitions (transformer_engine/common/recipe):

    delayed      one scale a tensor, from the largest magnitudes of earlier passes; forward e4m3, gradients e5m2 ("hybrid")
    tensorwise   one scale a tensor, from the tensor itself; hybrid
    blockwise    a power of two for each 1 x 128 values of activations and gradients, each 128 x 128 of weights; e4m3
    mxfp8        a power of two for each 1 x 32 values of everything; e4m3

Only the matrix products of the transformer layers' linear modules run in float8; embedding, output layer, norms and
attention stay in bfloat16. `backend="emulate"` rounds their inputs to float8 and back on any machine (`emulate.py`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# recipe -> (class of transformer_engine.common.recipe, format, least TE version, least compute capability,
#            multiple of the sizes of a product)
_RECIPES: dict[str, tuple[str, str, tuple[int, int], tuple[int, int], int]] = {
    "delayed": ("DelayedScaling", "hybrid", (1, 0), (8, 9), 16),
    "tensorwise": ("Float8CurrentScaling", "hybrid", (2, 2), (8, 9), 16),
    "blockwise": ("Float8BlockScaling", "e4m3", (2, 3), (9, 0), 16),
    "mxfp8": ("MXFP8BlockScaling", "e4m3", (2, 1), (10, 0), 32),
}
RECIPES = tuple(_RECIPES)
FORMATS = ("e4m3", "hybrid")
BACKENDS = ("transformer_engine", "emulate")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class PrecisionSettings:
    """Plain values; `problems` says what is wrong with them."""

    dtype: str = "bfloat16"  # of weights and activations; with bfloat16 the optimizer keeps float32 master weights
    fp8: str | None = None  # a recipe; None: no float8
    fp8_format: str | None = None  # e4m3 everywhere, or hybrid: gradients in e5m2; None: the recipe's own
    fp8_backend: str = "transformer_engine"
    fp8_params: bool = False  # the weights of float8 products are kept in float8 only
    first_layers_bf16: int = 0  # so many layers at the model's start stay in bfloat16
    last_layers_bf16: int = 0
    fp8_margin: int = 0  # delayed: scales are smaller by 2^margin than the largest magnitude would allow
    fp8_history: int = 1024  # delayed: passes whose largest magnitudes are remembered
    fp8_history_use: str = "max"  # delayed: the "max" of them, or the "most_recent"

    @property
    def format(self) -> str:
        return self.fp8_format or (_RECIPES[self.fp8][1] if self.fp8 in _RECIPES else "hybrid")

    @property
    def emulated(self) -> bool:
        return self.fp8 is not None and self.fp8_backend == "emulate"

    @property
    def label(self) -> str:
        """For logs and tables: "bfloat16", "fp8 mxfp8 e4m3", "fp8 delayed hybrid (emulated)"."""
        if self.fp8 is None:
            return self.dtype
        return f"fp8 {self.fp8} {self.format}{' (emulated)' if self.emulated else ''}"

    @property
    def token_multiple(self) -> int:
        """Packed rows have to be a multiple of this many tokens on each rank of a float8 product."""
        return _RECIPES[self.fp8][4] if self.fp8 is not None and not self.emulated else 1

    def in_bf16(self, layer: int, layers: int) -> bool:
        """Whether layer number `layer` (from 0) of the whole model's `layers` stays in bfloat16."""
        return self.fp8 is None or layer < self.first_layers_bf16 or layer >= layers - self.last_layers_bf16

    def transformer_fields(self) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig. None where float8 is emulated: Megatron knows nothing of that."""
        fields: dict[str, Any] = {
            "params_dtype": getattr(torch, self.dtype),
            "pipeline_dtype": getattr(torch, self.dtype),
            "bf16": self.dtype == "bfloat16",
        }
        if self.fp8 is None or self.emulated:
            return fields
        fields |= {
            "fp8": self.format,
            "fp8_recipe": self.fp8,
            "fp8_param": self.fp8_params,
            # Scales are agreed on by the ranks that hold one micro-batch. Megatron's default asks all data-parallel ranks in
            # every pass, which waits for ever where their numbers of micro-batches differ.
            "tp_only_amax_red": True,
        }
        if self.fp8 == "delayed":
            fields |= {
                "fp8_margin": self.fp8_margin,
                "fp8_amax_history_len": self.fp8_history,
                "fp8_amax_compute_algo": self.fp8_history_use,
            }
        if self.first_layers_bf16 or self.last_layers_bf16:
            fields |= {
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": self.first_layers_bf16,
                "num_layers_at_end_in_bf16": self.last_layers_bf16,
            }
        return fields


@dataclass(frozen=True)
class Machine:
    """What `problems` has to know of the machine."""

    cuda: bool
    capability: tuple[int, int] | None = None
    transformer_engine: tuple[int, int] | None = None  # its version

    @classmethod
    def here(cls) -> Machine:
        cuda = torch.cuda.is_available()
        try:
            parts = importlib.metadata.version("transformer_engine").split(".")
            version = (int(parts[0]), int(parts[1]))
        except (importlib.metadata.PackageNotFoundError, ValueError, IndexError):
            version = None
        return cls(cuda, torch.cuda.get_device_capability() if cuda else None, version)


def problems(
    settings: PrecisionSettings,
    *,
    layers: int,
    pipeline: int = 1,
    recompute: str = "none",
    widths: Mapping[str, int] | None = None,
    machine: Machine | None = None,
    where: str = "actor.precision",
) -> list[str]:
    """What cannot work, a sentence each with what would; empty: nothing.

    Args:
        layers: of the whole model. pipeline: stages.
        widths: name -> size on one rank of every dimension of a float8 product ("MLP units": 1536).
        machine: None: this one.
    """
    found = list(_values(settings, where))
    if found or settings.fp8 is None:
        return found
    machine = machine or Machine.here()
    found += _layers(settings, layers, pipeline, where)
    if settings.emulated:
        found += _emulation(settings, pipeline, recompute, where)
    else:
        found += _machine(settings, machine, where)
        multiple = _RECIPES[settings.fp8][4]
        found += [
            f"{where}.fp8={settings.fp8} needs sizes that divide by {multiple}, and a rank has {size} {name}; "
            f"set {where}.fp8=null, or another tensor-parallel size"
            for name, size in (widths or {}).items()
            if machine.cuda and size % multiple
        ]
    return found


def _values(settings: PrecisionSettings, where: str):
    legal = {
        "dtype": DTYPES,
        "fp8": (None, *RECIPES),
        "fp8_format": (None, *FORMATS),
        "fp8_backend": BACKENDS,
        "fp8_history_use": ("max", "most_recent"),
    }
    for name, values in legal.items():
        value = getattr(settings, name)
        if value not in values:
            yield f"{where}.{name} is {value}; it must be one of {', '.join(str(v or 'null') for v in values)}"
    for name, least in (("first_layers_bf16", 0), ("last_layers_bf16", 0), ("fp8_history", 1), ("fp8_margin", 0)):
        value = getattr(settings, name)
        if value < least:
            yield f"{where}.{name} is {value}; it must be at least {least}"
    if settings.fp8_params and settings.fp8 is None:
        yield f"{where}.fp8_params keeps weights in float8, and {where}.fp8 names no recipe; set one, or fp8_params=false"


def _layers(settings: PrecisionSettings, layers: int, pipeline: int, where: str):
    first, last = settings.first_layers_bf16, settings.last_layers_bf16
    if not (first or last):
        return
    if settings.fp8 == "delayed":
        yield (
            f"{where}.fp8=delayed cannot leave single layers in bfloat16 (their scales are settled for all layers at "
            f"once); set first_layers_bf16=0 and last_layers_bf16=0, or fp8=tensorwise"
        )
    stage = layers // pipeline
    for name, count in (("first_layers_bf16", first), ("last_layers_bf16", last)):
        if count > stage:
            yield f"{where}.{name} is {count}, more than the {stage} layers of a pipeline stage; set it to at most {stage}"
    if first + last >= layers:
        yield (
            f"{where}.first_layers_bf16+last_layers_bf16={first + last} leave none of the {layers} layers to float8; "
            f"set fp8=null, or fewer"
        )


def _machine(settings: PrecisionSettings, machine: Machine, where: str):
    _, _, version, capability, _ = _RECIPES[str(settings.fp8)]
    way_out = f"set {where}.fp8=null, or {where}.fp8_backend=emulate to study its numerics here"
    head = f"{where}.fp8={settings.fp8}"
    if settings.dtype != "bfloat16":
        yield f"{head} computes float8 products on top of bfloat16, not {settings.dtype}; set model.dtype=bfloat16"
    if not machine.cuda:
        yield f"{head} needs an NVIDIA GPU and Transformer Engine, and this machine has no CUDA; {way_out}"
    elif machine.transformer_engine is None:
        yield f"{head} needs Transformer Engine, which is not installed; install transformer-engine[pytorch], or {way_out}"
    elif machine.transformer_engine < version:
        have, need = (".".join(map(str, v)) for v in (machine.transformer_engine, version))
        yield f"{head} needs Transformer Engine {need} or newer, and {have} is installed; install a newer one, or {way_out}"
    if machine.capability is not None and machine.capability < capability:
        have, need = (".".join(map(str, c)) for c in (machine.capability, capability))
        yield f"{head} needs a GPU of compute capability {need} or higher, and this one has {have}; {way_out}"


def _emulation(settings: PrecisionSettings, pipeline: int, recompute: str, where: str):
    if settings.fp8_params:
        yield (
            f"{where}.fp8_params has no meaning with fp8_backend=emulate, which keeps the weights as they are; "
            f"set fp8_params=false"
        )
    if settings.fp8 == "delayed" and recompute == "full" and pipeline > 1:
        yield (
            f"{where}.fp8=delayed (emulated) with recompute=full in a pipeline would recompute a micro-batch at later scales "
            f"than it was computed at; set recompute=none or fp8=tensorwise"
        )

"""What a rank of a rollout engine holds: its part of the weights, and the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.bridge import fp8
from megarl.bridge.layout import Split
from megarl.bridge.model_map import ModelMap, Parameter, padded
from megarl.bridge.states import SIZES
from megarl.config import Config
from megarl.controller.sizes import cache_tokens
from megarl.plan.hardware import GIB, Hardware

# SGLang works out mem_fraction_static from the card and what it will compute at a time: about 0.82 for 80 GB, 0.9 for 141 GB.
FRACTION = 0.85


@dataclass(frozen=True)
class EngineLoad:
    """Of each rank of an engine."""

    weights: int  # bytes
    cache: int  # bytes
    tokens: int  # that the cache holds
    wanted: int  # tokens of all responses of a step that an engine has to sample, at their longest


def engine_load(cfg: Config, model: ModelMap, hardware: Hardware) -> EngineLoad:
    """Weights are cut over the engine's ranks as SGLang cuts them; key-value heads that are fewer than ranks are held by several."""
    r = cfg.rollout
    ranks = int(r.engine.get("tp_size", 1))
    dtype = r.dtype or cfg.model.dtype
    sizes = element_sizes(cfg, model)
    weights = sum(_weight_bytes(p, ranks, sizes[p.hf_names[0]]) for p in model.parameters if p.exported)
    a_token = _token_bytes(model, ranks, 1 if "fp8" in str(r.engine.get("kv_cache_dtype", "auto")) else SIZES[dtype])
    wanted = cache_tokens(cfg, r.engines, r.oversample)
    tokens = r.max_total_tokens
    if tokens is None and not hardware.gpu:
        tokens = wanted
    if hardware.gpu and (tokens is None or "mem_fraction_static" in r.engine):
        static = float(r.engine.get("mem_fraction_static", FRACTION)) * hardware.memory_gib * GIB
        room = max(0, int(static) - weights) // a_token
        tokens = room if tokens is None else min(tokens, room)
    return EngineLoad(weights, tokens * a_token, tokens, wanted)


def element_sizes(cfg: Config, model: ModelMap) -> dict[str, float]:
    """Bytes a number of each of the checkpoint's tensors, as engines have it."""
    size = SIZES[cfg.rollout.dtype or cfg.model.dtype]
    float8 = fp8.quantised(model) if cfg.rollout.quantization else {}
    return {name: fp8.A_WEIGHT if name in float8 else size for name in model.hf_shapes}


def _weight_bytes(parameter: Parameter, ranks: int, size: float) -> int:
    """Of one Megatron parameter's tensors in an engine's rank, `size` bytes a number."""
    size = 4 if parameter.float32 else size
    if parameter.replicated:
        return round(sum(math.prod(part.shape) for part in parameter.parts) * size)
    total = 0
    for number, part in enumerate(parameter.parts):
        rows, *rest = part.shape
        if parameter.pad_vocabulary:
            rows = padded(rows, 64)
        keys = (
            number > 0
            and len(parameter.parts) == 3
            and parameter.name.endswith(("linear_qkv.weight", "linear_qkv.bias"))
        )
        cut = min(ranks, parameter.groups) if keys else ranks
        total += int(rows * math.prod(rest) * size) // (cut if parameter.split in (Split.ROWS, Split.COLUMNS) else 1)
    return total


def _token_bytes(model: ModelMap, ranks: int, size: int) -> int:
    """Of the cache in an engine's rank, a token: keys and values, or, of latent attention, the latent, which every rank has whole."""
    dims = model.dims
    if model.is_latent:
        return dims.layers * dims.kv_down * size
    return dims.layers * 2 * max(1, dims.kv_heads // ranks) * dims.head_dim * size

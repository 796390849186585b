"""Rotary embeddings in half of the operations, for SGLang on CPU: the same numbers to the bit.

SGLang looks cosines and sines up, halves queries and keys, makes four products of each and puts them together again, twice: 17
operations a layer that compute or copy something. Here tables hold them as wide as a head, and the half that is subtracted with its
sign.

Loaded with `megarl.cpu.attention`. It does nothing where CUDA is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def activate() -> None:
    """SGLang's plain implementation; those of DeepSeek and of several axes have their own."""
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.rotary_embedding.RotaryEmbedding.forward_native", _turned, HookType.AROUND)


def _turned(
    original: Callable[..., Any],
    rotary: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    known = offsets is None and fused_set_kv_buffer_arg is None and not hasattr(rotary, "sin_cos_cache")
    if not known or not rotary.is_neox_style:
        answer: tuple[torch.Tensor, torch.Tensor] = original(
            rotary, positions, query, key, offsets, fused_set_kv_buffer_arg
        )
        return answer
    rows_TE = _wide(rotary).index_select(0, positions.flatten()).to(query.dtype)
    cos_T1R, sin_T1R = rows_TE[:, None].chunk(2, dim=-1)
    return turn(query, cos_T1R, sin_T1R, rotary.head_size), turn(key, cos_T1R, sin_T1R, rotary.head_size)


def turn(x: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, head_size: int) -> torch.Tensor:
    """The first R of each head's numbers, turned. x: (T, heads * head_size). sin_T1R: its first half negative."""
    x_THD = x.view(len(cos_T1R), -1, head_size)
    size = cos_T1R.shape[-1]
    part_THR = x_THD[..., :size]
    # Two products and their sum, each rounded, as SGLang and Megatron do it.
    out_THR = (part_THR * cos_T1R).add_(part_THR.roll(size // 2, -1).mul_(sin_T1R))
    if size < head_size:
        out_THR = torch.cat((out_THR, x_THD[..., size:]), dim=-1)
    return out_THR.view(x.shape)


def _wide(rotary: Any) -> torch.Tensor:
    """Of each position cosines, twice, and sines, first negative. Made anew where SGLang has made its own anew."""
    source, wide = getattr(rotary, "_wide", (None, None))
    if source is not rotary.cos_sin_cache or wide is None:
        source = rotary.cos_sin_cache
        cos, sin = source.chunk(2, dim=-1)
        wide = torch.cat([cos, cos, -sin, sin], dim=-1)
        rotary._wide = (source, wide)
    return wide

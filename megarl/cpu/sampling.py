"""Sampling from a large vocabulary, for SGLang on CPU.

`torch.multinomial` draws one random number a token of the vocabulary: for 64 sequences and 49,152 tokens 30 to 100 ms, up to
half of a decode step of a small model. Here one random number a sequence is looked up in the cumulated distribution, in two
levels: 0.5 ms.

Loaded through the entry point group `sglang.srt.plugins`, like `megarl.cpu.attention`. It does nothing where CUDA is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BLOCK = 128  # tokens; the first level sums blocks, the second looks into one


def activate() -> None:
    """Replace the multinomial of SGLang's torch sampler; requests with a seed of their own keep SGLang's."""
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.sampler.sampling_from_probs_torch", _sample, HookType.AROUND)


def _sample(original: Callable[..., torch.Tensor], probs: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    if args or options.get("sampling_seed") is not None:
        return original(probs, *args, **options)
    return draw(probs).to(torch.int32)


def draw(probs_BV: torch.Tensor) -> torch.Tensor:
    """One index a row, int64 (B), with probability proportional to the row's entries (float32, >= 0, not all 0).

    An entry of 0 is never drawn. Uses torch's global generator.
    """
    batch, size = probs_BV.shape
    full = size // BLOCK * BLOCK
    sums_BN = probs_BV[:, :full].reshape(batch, -1, BLOCK).sum(-1)
    if full < size:
        sums_BN = torch.cat([sums_BN, probs_BV[:, full:].sum(-1, keepdim=True)], dim=-1)
    block_B1, rest_B1 = _look_up(sums_BN, torch.rand(batch, 1, dtype=torch.float64))
    token_BK = block_B1 * BLOCK + torch.arange(BLOCK)
    inside_BK = probs_BV.gather(1, token_BK.clamp(max=size - 1)).masked_fill_(token_BK >= size, 0.0)
    token_B1, _ = _look_up(inside_BK, rest_B1)
    return (block_B1 * BLOCK + token_B1).squeeze(1)


def _look_up(weights_BN: torch.Tensor, fraction_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The entry in which a fraction (of 1) of a row's weight falls, and the fraction of that entry's weight below it."""
    edges_BN = weights_BN.double().cumsum(-1)
    total_B1 = edges_BN[:, -1:].contiguous()
    aim_B1 = fraction_B1 * total_B1
    last_B1 = torch.searchsorted(edges_BN, total_B1)  # of the entries above 0: rounding must not carry us beyond it
    index_B1 = torch.minimum(torch.searchsorted(edges_BN, aim_B1, right=True), last_B1)
    weight_B1 = weights_BN.gather(1, index_B1).double()
    below_B1 = edges_BN.gather(1, index_B1) - weight_B1
    return index_B1, ((aim_B1 - below_B1) / weight_B1).clamp_(0.0, 1.0)

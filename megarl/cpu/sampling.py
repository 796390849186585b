"""Sampling from a large vocabulary, for SGLang on CPU: fast, and with a seed a request.

`torch.multinomial` draws one random number a token of the vocabulary: for 64 sequences and 49,152 tokens 30 to 100 ms, up to
half of a decode step of a small model. Here one random number a sequence is looked up in the cumulated distribution, in two
levels: 0.5 ms. It is made of the request's seed and the token's position, so that a response depends on neither when its request
came nor on what was sampled beside it. (SGLang heeds seeds only with `enable_deterministic_inference`, which knows no CPU.)

Loaded through the entry point group `sglang.srt.plugins`, like `megarl.cpu.attention`. It does nothing where CUDA is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megarl.splitmix import STEP, mixed, shift_right

BLOCK = 128  # tokens; the first level sums blocks, the second looks into one
FEW = 256  # tokens; to find so many costs a twentieth of sorting 49,152


def activate() -> None:
    """Replace the multinomial of SGLang's torch sampler, and let requests keep their seeds."""
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    sampler, batches = "sglang.srt.layers.sampler.", "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo."
    HookRegistry.register(f"{sampler}sampling_from_probs_torch", _sample, HookType.AROUND)
    HookRegistry.register(f"{sampler}top_k_top_p_min_p_sampling_from_probs_torch", _sample_filtered, HookType.AROUND)
    HookRegistry.register(f"{batches}from_schedule_batch", _with_seeds, HookType.AROUND)


def _with_seeds(original: Callable[..., Any], cls: type, batch: Any, *args: Any, **options: Any) -> Any:
    info = original(cls, batch, *args, **options)
    if info.sampling_seed is None:
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return info


def _sample(
    original: Callable[..., torch.Tensor],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    return draw(probs, fractions(sampling_seed, positions)).to(torch.int32)


def _sample_filtered(
    original: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor,
    positions: torch.Tensor,
    **options: Any,
) -> Any:
    """SGLang sorts the whole vocabulary, and given seeds it refuses min-p."""
    if options.get("return_filtered_probs"):  # for requests that ask what they were drawn from, which none of ours do
        return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, None, positions, **options)
    kept_BV = likely(probs, top_ks, top_ps, min_ps if need_min_p_sampling else None)
    return draw(kept_BV, fractions(sampling_seed, positions)).to(torch.int32)


def likely(
    probs_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor, min_p_B: torch.Tensor | None = None
) -> torch.Tensor:
    """The probabilities, and 0 for what is left out: all but the top_k likeliest; those before which more than top_p has been
    reached already, the likeliest first; those below min_p of the likeliest. As SGLang understands these settings.

    Few tokens are usually kept: the 256 likeliest are looked for, and all are sorted only where these did not do.
    """
    size = probs_BV.shape[1]
    for width in (min(FEW, size), size):
        values_BW, ids_BW = probs_BV.topk(width, dim=-1)
        keep_BW = torch.arange(width) < top_k_B[:, None]
        keep_BW &= values_BW.cumsum(-1) - values_BW <= top_p_B[:, None]
        if min_p_B is not None:
            keep_BW &= values_BW >= values_BW[:, :1] * min_p_B[:, None]
        if not bool(keep_BW[:, -1].any()):
            break
    return torch.zeros_like(probs_BV).scatter_(1, ids_BW, values_BW * keep_BW)


def fractions(seed_B: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
    """A random number of [0, 1) a row, float64 (B): SplitMix64 of seed and position, both int64."""
    return shift_right(mixed(seed_B + (position_B.to(torch.int64) + 1) * STEP), 11).double() / (1 << 53)


def draw(probs_BV: torch.Tensor, fraction_B: torch.Tensor) -> torch.Tensor:
    """One index a row, int64 (B): where a random number of [0, 1) falls in the cumulated entries (float32, >= 0, not all 0), so
    with probability proportional to them. An entry of 0 is never drawn."""
    batch, size = probs_BV.shape
    full = size // BLOCK * BLOCK
    sums_BN = probs_BV[:, :full].reshape(batch, full // BLOCK, BLOCK).sum(-1)
    if full < size:
        sums_BN = torch.cat([sums_BN, probs_BV[:, full:].sum(-1, keepdim=True)], dim=-1)
    block_B1, rest_B1 = _look_up(sums_BN, fraction_B[:, None])
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

"""Log-probs and entropy from hidden states, over a vocabulary split across tensor-parallel ranks, a chunk of tokens at a time.

Full logits of N tokens never exist: each chunk's logits are made, reduced to a few numbers a token and made again in the
backward pass. Memory is O(chunk · vocabulary / ranks) instead of O(N · vocabulary).

For logits z (already divided by the temperature), p = softmax(z), l = log p:
    log-prob of target y        l_y          d/dz_j = [j = y] - p_j
    entropy H = -Σ p_j l_j                   d/dz_j = -p_j (l_j + H)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class TokenScores(NamedTuple):
    log_probs: torch.Tensor  # (N,) float32
    entropy: torch.Tensor  # (N,) float32, in nats


class _Head(torch.autograd.Function):
    """(N,H) hidden, (V/ranks,H) weight, (N,) targets -> log-probs (N,), entropy (N,)."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, first, vocabulary, temperature, chunk, group):
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, log_z = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for rows in _chunks(len(hidden), chunk):
            z = _logits(hidden[rows], weight, first, vocabulary, temperature)
            top = z.amax(dim=1)
            _all_reduce(top, dist.ReduceOp.MAX, group)
            own = targets[rows] - first
            here = (own >= 0) & (own < z.shape[1])
            target = z.gather(1, own.clamp(0, z.shape[1] - 1)[:, None])[:, 0].masked_fill(~here, 0.0)
            z.sub_(top[:, None])
            weight_of = z.exp()
            z.masked_fill_(z == float("-inf"), 0.0)  # padding of the vocabulary: 0 · -inf is not 0
            sums = torch.stack([weight_of.sum(dim=1), (weight_of * z).sum(dim=1), target])
            _all_reduce(sums, dist.ReduceOp.SUM, group)
            log_sum = sums[0].log()
            log_z[rows] = top + log_sum
            entropy[rows] = log_sum - sums[1] / sums[0]
            log_probs[rows] = sums[2] - log_z[rows]
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.rest = (first, vocabulary, temperature, chunk)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        first, vocabulary, temperature, chunk = ctx.rest
        grad_hidden = torch.empty_like(hidden)
        # Chunks are summed in float32: many small bfloat16 addends would be lost.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        with_entropy = bool(grad_entropy.count_nonzero())
        for rows in _chunks(len(hidden), chunk):
            z = _logits(hidden[rows], weight, first, vocabulary, temperature)
            log_p = z.sub_(log_z[rows, None])
            p = log_p.exp()
            grad = p * -grad_log_probs[rows, None]
            if with_entropy:
                log_p.masked_fill_(log_p == float("-inf"), 0.0)
                grad -= grad_entropy[rows, None] * p * (log_p + entropy[rows, None])
            own = targets[rows] - first
            here = (own >= 0) & (own < p.shape[1])
            column = own.clamp(0, p.shape[1] - 1)[:, None]
            grad.scatter_add_(1, column, (grad_log_probs[rows] * here)[:, None])
            grad = grad.div_(temperature).to(weight.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _chunks(total: int, size: int):
    return (slice(a, min(a + size, total)) for a in range(0, total, size))


def _logits(hidden, weight, first, vocabulary, temperature) -> torch.Tensor:
    """(n, V/ranks) float32; columns past the real vocabulary are -inf."""
    z = (hidden @ weight.t()).float()
    if temperature != 1.0:
        z.div_(temperature)
    real = vocabulary - first
    if real < z.shape[1]:
        z[:, max(real, 0) :] = float("-inf")
    return z


def _all_reduce(x: torch.Tensor, op, group) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(x, op=op, group=group)


def token_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    chunk: int = 1024,
    group: dist.ProcessGroup | None = None,
) -> TokenScores:
    """Log-prob of each target and entropy of its distribution, at `temperature`, differentiable in hidden and weight.

    Args:
        hidden: (N, H) states that predict the targets, equal on all ranks of `group`. The gradient that flows back to it is this
            rank's share; the caller's region sums the shares.
        weight: (V/ranks, H) this rank's rows of the output layer, vocabulary order by rank.
        targets: (N,) token ids in [0, vocabulary).
        vocabulary: real entries; rows of padding beyond it count for nothing.
        temperature: > 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to take log-probs at it, not {temperature}")
    rank = dist.get_rank(group) if group is not None else 0
    return TokenScores(
        *_Head.apply(hidden.to(weight.dtype), weight, targets, rank * weight.shape[0], vocabulary, temperature, chunk, group)
    )

"""Log-probs and entropy from hidden states, over a vocabulary split across tensor-parallel ranks, a chunk of tokens at a time.

Full logits of N tokens never exist: each chunk's logits are made, reduced to a few numbers a token and made again in the
backward pass. Memory is O(chunk · vocabulary / ranks) instead of O(N · vocabulary).

For logits z (already divided by the temperature), p = softmax(z), l = log p:
    log-prob of target y        l_y          d/dz_j = [j = y] - p_j
    entropy H = -Σ p_j l_j                   d/dz_j = -p_j (l_j + H)
    collision probability Σ p_j²             on request, without gradient
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

_CACHE_ELEMENTS = 1 << 20  # 4 MiB of float32
_WEIGHT_ROWS = 8192  # of the output layer, whose gradient is added up block by block


class TokenScores(NamedTuple):
    log_probs: torch.Tensor  # (N,) float32
    entropy: torch.Tensor  # (N,) float32, in nats
    sum_p2: torch.Tensor | None = None  # (N,) float32, Σ p² over the vocabulary, where it was asked for


class _Head(torch.autograd.Function):
    """(N,H) hidden, (V/ranks,H) weight, (N,) targets -> log-probs (N,), entropy (N,), Σ p² (N,) or None."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, split, temperature, chunk, with_p2):
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, log_z = torch.empty_like(log_probs), torch.empty_like(log_probs)
        sum_p2 = torch.empty_like(log_probs) if with_p2 else None
        for rows in _slices(len(hidden), chunk):
            raw = hidden[rows] @ weight.t()
            top = torch.full_like(log_z[rows], -torch.inf)
            if split.real:
                top = raw[:, : split.real].amax(dim=1).float().div_(temperature)
            _all_reduce(top, dist.ReduceOp.MAX, split.group)
            # With e = exp(z - top): Σ e, Σ e·(z - top), z of the target - top, Σ e²: over this rank's part of the vocabulary.
            sums = torch.zeros(3 + with_p2, len(raw), dtype=torch.float32, device=raw.device)
            own, here = split.own(targets[rows])
            for part in _blocks(raw[:, : split.real]):
                z = raw[part, : split.real].float().div_(temperature).sub_(top[part, None])
                sums[2, part] = torch.where(here[part], z.gather(1, own[part, None])[:, 0], 0.0)
                weights = z.exp()
                sums[0, part] = weights.sum(dim=1)
                if with_p2:
                    sums[3, part] = torch.linalg.vecdot(weights, weights)
                sums[1, part] = weights.mul_(z).sum(dim=1)
            _all_reduce(sums, dist.ReduceOp.SUM, split.group)
            log_sum = sums[0].log()
            log_z[rows] = top + log_sum
            entropy[rows] = log_sum - sums[1] / sums[0]
            log_probs[rows] = sums[2] - log_sum
            if sum_p2 is not None:
                sum_p2[rows] = sums[3] / sums[0].square()
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.rest = (split, temperature, chunk)
        if sum_p2 is not None:
            ctx.mark_non_differentiable(sum_p2)
        return log_probs, entropy, sum_p2

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, _):
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        split, temperature, chunk = ctx.rest
        grad_hidden = torch.empty_like(hidden)
        # Chunks are summed in float32: many small bfloat16 addends would be lost.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        with_entropy = bool(grad_entropy.count_nonzero())
        for rows in _slices(len(hidden), chunk):
            raw = hidden[rows] @ weight.t()
            own, here = split.own(targets[rows])
            g, g_entropy = grad_log_probs[rows, None], grad_entropy[rows, None]
            raw[:, split.real :] = 0  # no gradient reaches the padding of the vocabulary
            for part in _blocks(raw[:, : split.real]):
                log_p = raw[part, : split.real].float().div_(temperature).sub_(log_z[rows][part, None])
                p = log_p.exp()
                grad = p * -g[part]
                if with_entropy:
                    grad -= log_p.add_(entropy[rows][part, None]).mul_(p).mul_(g_entropy[part])
                grad.scatter_add_(1, own[part, None], g[part] * here[part, None])
                raw[part, : split.real] = grad.div_(temperature)
            grad_hidden[rows] = raw @ weight
            for part in _slices(len(weight), _WEIGHT_ROWS):  # of all rows at once it would be a second (V, H) tensor
                grad_weight[part] += raw[:, part].t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


class _Split(NamedTuple):
    """This rank's part of the vocabulary: entries first … first + real - 1; rows of the weight beyond are padding."""

    first: int
    real: int
    group: dist.ProcessGroup | None

    def own(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(column in this rank's part, clamped; whether the target is in it)."""
        own = targets - self.first
        here = (own >= 0) & (own < self.real)
        return own.clamp(0, max(self.real - 1, 0)), here


def _slices(total: int, size: int):
    return (slice(a, min(a + size, total)) for a in range(0, total, size))


def _blocks(x: torch.Tensor):
    """Rows to work on at a time: on CPU few enough to stay in the cache while a dozen operations pass over them."""
    if x.shape[1] == 0:
        return iter(())
    rows = len(x) if x.is_cuda else max(1, _CACHE_ELEMENTS // x.shape[1])
    return _slices(len(x), max(rows, 1))


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
    sum_p2: bool = False,
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
    first = weight.shape[0] * (dist.get_rank(group) if group is not None else 0)
    split = _Split(first, max(0, min(weight.shape[0], vocabulary - first)), group)
    return TokenScores(*_Head.apply(hidden.to(weight.dtype), weight, targets, split, temperature, chunk, sum_p2))


def join(values: torch.Tensor, slots: torch.Tensor, total: int, group: dist.ProcessGroup) -> torch.Tensor:
    """(N, R here) values of this rank's `slots` -> (N, total) of all ranks of context parallelism, each slot from one rank.

    Every rank goes on to compute the same loss from the same values, so the gradient of its own is what it needs, unsummed.
    """
    return _Join.apply(values, slots, total, group)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, slots, total, group):
        ctx.save_for_backward(slots)
        whole = values.new_zeros(len(values), total)
        whole[:, slots] = values
        if total:
            dist.all_reduce(whole, group=group)  # zeros but from one rank: exact
        return whole

    @staticmethod
    def backward(ctx, grad):
        (slots,) = ctx.saved_tensors
        return grad[:, slots], None, None, None

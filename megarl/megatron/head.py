"""Log-probs and entropy from hidden states, over a vocabulary split across tensor-parallel ranks, a chunk of tokens at a time.

Full logits of N tokens never exist: each chunk's logits are made, reduced to a few numbers a token and made again in the
backward pass. Memory is O(chunk · vocabulary / ranks) instead of O(N · vocabulary).

For logits z (already divided by the temperature, and where a family caps them c · tanh(z / c) before that), p = softmax(z),
l = log p:
    log-prob of target y        l_y          d/dz_j = [j = y] - p_j
    entropy H = -Σ p_j l_j                   d/dz_j = -p_j (l_j + H)
    collision probability Σ p_j²             on request, without gradient
    log R, R = Σ_{j not in A} p_j            d/dz_j = [j not in A] p_j / R - p_j, with log-probs of chosen tokens A: a sum, since
                                             1 - Σ_A p_j knows nothing below float32's 1e-7
    KL to a reference q Σ p_j (l_j - log q_j)    d/dz_j = p_j (l_j - log q_j - KL), on request; the reference's logits are
                                             made chunk by chunk too, from its hidden states and its output layer
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


class Divergences(NamedTuple):
    """What else one pass makes, each where it was asked for."""

    scores: TokenScores
    kl: torch.Tensor | None = None  # (N,) float32, KL(p || q) to the reference over the whole vocabulary
    at_log_probs: torch.Tensor | None = None  # (N, K) float32 log-probs of the tokens `at`
    top_ids: torch.Tensor | None = None  # (N, k) int64, the most probable tokens, the likeliest first
    top_log_probs: torch.Tensor | None = None  # (N, k) float32
    log_rest: torch.Tensor | None = (
        None  # (N,) float32, log of the mass of all tokens but `at` or, without `at`, the likeliest
    )


class _Options(NamedTuple):
    split: _Split
    temperature: float
    chunk: int
    with_p2: bool
    top_k: int
    softcap: float | None


class _Head(torch.autograd.Function):
    """(N,H) hidden, (V/ranks,H) weight, (N,M) targets, hidden and weight of a reference or None -> log-probs (N,M), entropy (N,),
    KL (N,) or None, Σ p² (N,) or None, the likeliest tokens (N,k) and their log-probs or None, log of the rest's mass (N,) or
    None. The first target is the token itself, the others are `at`."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, ref_hidden, ref_weight, options):
        split, t, chunk, with_p2, top_k, softcap = options
        count, many = targets.shape
        log_probs = hidden.new_empty(count, many, dtype=torch.float32)
        entropy, log_z, ref_log_z = (hidden.new_empty(count, dtype=torch.float32) for _ in range(3))
        kl = torch.empty_like(entropy) if ref_hidden is not None else None
        sum_p2 = torch.empty_like(entropy) if with_p2 else None
        ids = targets.new_empty(count, top_k) if top_k else None
        top_log_probs = hidden.new_empty(count, top_k, dtype=torch.float32) if top_k else None
        log_rest = torch.empty_like(entropy) if many > 1 or top_k else None
        for rows in _slices(count, chunk):
            raw = _logits(hidden[rows], weight, softcap)
            ref_raw = None if kl is None else _logits(ref_hidden[rows], ref_weight, softcap)
            top, ref_top = _top(raw, split, t), None if ref_raw is None else _top(ref_raw, split, t)
            if ids is not None:  # before the logits are worked on in place
                ids[rows], top_log_probs[rows] = _likeliest(raw, split, top_k)
            # With e = exp(z - top): Σ e, Σ e·(z - top), Σ e², of a reference Σ e·(z' - top'), Σ exp(z' - top'), Σ e of the rest,
            # and z of the targets - top: over this rank's part of the vocabulary.
            sums = torch.zeros(6 + many, len(raw), dtype=torch.float32, device=raw.device)
            own, here = split.own(targets[rows])
            out, out_here = split.own(targets[rows, 1:] if many > 1 or ids is None else ids[rows])
            for part in _blocks(raw[:, : split.real]):
                z = raw[part, : split.real].float().div_(t).sub_(top[part, None])
                sums[6:, part] = torch.where(here[part], z.gather(1, own[part]), 0.0).t()
                weights = z.exp()
                sums[0, part] = weights.sum(dim=1)
                if with_p2:
                    sums[2, part] = torch.linalg.vecdot(weights, weights)
                if ref_raw is not None:
                    other = ref_raw[part, : split.real].float().div_(t).sub_(ref_top[part, None])
                    sums[4, part] = other.exp().sum(dim=1)
                    sums[3, part] = other.mul_(weights).sum(dim=1)
                if log_rest is not None:
                    gone = weights.gather(1, out[part]) * out_here[part]
                    sums[5, part] = weights.scatter_add(1, out[part], -gone).sum(dim=1)
                sums[1, part] = weights.mul_(z).sum(dim=1)
            _all_reduce(sums, dist.ReduceOp.SUM, split.group)
            log_sum = sums[0].log()
            log_z[rows] = top + log_sum
            entropy[rows] = log_sum - sums[1] / sums[0]
            log_probs[rows] = (sums[6:] - log_sum).t()
            if sum_p2 is not None:
                sum_p2[rows] = sums[2] / sums[0].square()
            if kl is not None:
                ref_log_z[rows] = ref_top + sums[4].log()
                kl[rows] = ((sums[1] - sums[3]) / sums[0] - log_sum + sums[4].log()).clamp_(min=0.0)  # rounding
            if top_log_probs is not None:
                # In the order of the targets' arithmetic: the same model asked `at` these gives the same bits.
                top_log_probs[rows] = top_log_probs[rows].div_(t).sub_(top[:, None]).sub_(log_sum[:, None])
            if log_rest is not None:
                log_rest[rows] = sums[5].log() - log_sum
            del raw, ref_raw  # before there are others
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy, ref_hidden, ref_weight, ref_log_z, kl, log_rest)
        ctx.options = options
        fixed = (sum_p2, ids, top_log_probs, log_rest if many == 1 else None)
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        return log_probs, entropy, kl, sum_p2, ids, top_log_probs, log_rest

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, grad_kl, _p2, _ids, _top, grad_rest):
        hidden, weight, *_ = ctx.saved_tensors
        options: _Options = ctx.options
        # Over the vocabulary outside and over tokens inside: the gradient of a block of the weight is then finished at once, and
        # what is summed in float32 (many small bfloat16 addends would be lost) is a block of it and (N, H), never (V, H).
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight)
        grads = (grad_log_probs, grad_entropy, grad_kl, grad_rest)
        wanted = tuple(g is not None and bool(g.count_nonzero()) for g in grads)
        for columns in _slices(len(weight), _WEIGHT_ROWS):
            grad_block = torch.zeros_like(weight[columns], dtype=torch.float32)
            # As many logits at a time as a chunk has in the forward pass.
            for rows in _slices(len(hidden), max(1, options.chunk * len(weight) // len(grad_block))):
                raw = _logit_gradients(ctx.saved_tensors, options, rows, columns, grads, wanted)
                grad_hidden[rows] += raw @ weight[columns]
                grad_block += raw.t() @ hidden[rows]
                del raw  # before there are others
            grad_weight[columns] = grad_block
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def _logit_gradients(saved, options: _Options, rows: slice, columns: slice, grads, wanted) -> torch.Tensor:
    """(rows, columns) the gradient of these tokens' logits of this part of the vocabulary, before the temperature."""
    hidden, weight, targets, log_z, entropy, ref_hidden, ref_weight, ref_log_z, kl, log_rest = saved
    _, with_entropy, with_kl, with_rest = wanted
    split, t = options.split.within(columns), options.temperature
    softcap = options.softcap
    raw = _logits(hidden[rows], weight[columns], softcap)
    ref_raw = _logits(ref_hidden[rows], ref_weight[columns], softcap) if with_kl else None
    own, here = split.own(targets[rows])
    g, g_entropy, g_kl, g_rest = (None if x is None else x[rows] for x in grads)
    raw[:, split.real :] = 0  # no gradient reaches the padding of the vocabulary
    for part in _blocks(raw[:, : split.real]):
        # Of the capped logits by the uncapped ones; first, for in float32 the logits are worked on in place.
        slope = None if softcap is None else 1.0 - (raw[part, : split.real].float() / softcap).square()
        log_p = raw[part, : split.real].float().div_(t).sub_(log_z[rows][part, None])
        p = log_p.exp()
        grad = p * -g[part].sum(dim=1, keepdim=True)
        if ref_raw is not None:
            log_q = ref_raw[part, : split.real].float().div_(t).sub_(ref_log_z[rows][part, None])
            gap = log_q.neg_().add_(log_p).sub_(kl[rows][part, None])
            grad += gap.mul_(p).mul_(g_kl[part, None])
        if with_rest:
            # No other token has more than the rest together: at most 1, and the chosen ones' exp cannot overflow.
            part_of = (log_p - log_rest[rows][part, None]).clamp_(max=0.0).exp_()
            gone = part_of.gather(1, own[part, 1:]) * here[part, 1:]
            part_of.scatter_add_(1, own[part, 1:], -gone).sub_(p)
            grad += part_of.mul_(g_rest[part, None])
        if with_entropy:
            grad -= log_p.add_(entropy[rows][part, None]).mul_(p).mul_(g_entropy[part, None])
        grad.scatter_add_(1, own[part], g[part] * here[part])
        if slope is not None:
            grad.mul_(slope)
        raw[part, : split.real] = grad.div_(t)
    return raw


def _logits(hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """(rows, V/ranks) of some rows, capped where the family does that."""
    raw = hidden @ weight.t()
    return raw if softcap is None else raw.div_(softcap).tanh_().mul_(softcap)


def _top(raw: torch.Tensor, split: _Split, temperature: float) -> torch.Tensor:
    """(rows,) the largest logit of all ranks' parts, at the temperature."""
    top = torch.full((len(raw),), -torch.inf, device=raw.device)
    if split.real:
        top = raw[:, : split.real].amax(dim=1).float().div_(temperature)
    _all_reduce(top, dist.ReduceOp.MAX, split.group)
    return top


def _likeliest(raw: torch.Tensor, split: _Split, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, count) ids and logits, as float32, of the largest logits of all ranks' parts."""
    ranks = 1 if split.group is None else dist.get_world_size(split.group)
    own = min(count, split.real)
    values = torch.full((ranks, len(raw), count), -torch.inf, device=raw.device)
    ids = torch.zeros(ranks, len(raw), count, dtype=torch.int64, device=raw.device)
    at = 0 if ranks == 1 else dist.get_rank(split.group)
    best = raw[:, : split.real].topk(own, dim=1)
    values[at, :, :own], ids[at, :, :own] = best.values.float(), best.indices + split.first
    if ranks > 1:  # each row of ranks is one rank's
        _all_reduce(values, dist.ReduceOp.MAX, split.group)
        _all_reduce(ids, dist.ReduceOp.SUM, split.group)
    merged = values.transpose(0, 1).flatten(1).topk(count, dim=1)
    return ids.transpose(0, 1).flatten(1).gather(1, merged.indices), merged.values


class _Split(NamedTuple):
    """This rank's part of the vocabulary: entries first … first + real - 1; rows of the weight beyond are padding."""

    first: int
    real: int
    group: dist.ProcessGroup | None

    def within(self, columns: slice) -> _Split:
        """A part of this part."""
        return _Split(
            self.first + columns.start, min(max(self.real - columns.start, 0), columns.stop - columns.start), self.group
        )

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
    softcap: float | None = None,
) -> TokenScores:
    """Log-prob of each target and entropy of its distribution, at `temperature`, differentiable in hidden and weight.

    Args:
        hidden: (N, H) states that predict the targets, equal on all ranks of `group`. The gradient that flows back to it is this
            rank's share; the caller's region sums the shares.
        weight: (V/ranks, H) this rank's rows of the output layer, vocabulary order by rank.
        targets: (N,) token ids in [0, vocabulary).
        vocabulary: real entries; rows of padding beyond it count for nothing.
        temperature: > 0.
        softcap: c of logits that are capped, c · tanh(logit / c), before the temperature divides them.
    """
    return divergences(
        hidden,
        weight,
        targets,
        vocabulary=vocabulary,
        temperature=temperature,
        chunk=chunk,
        group=group,
        sum_p2=sum_p2,
        softcap=softcap,
    ).scores


def divergences(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    chunk: int = 1024,
    group: dist.ProcessGroup | None = None,
    sum_p2: bool = False,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    at: torch.Tensor | None = None,
    top_k: int = 0,
    softcap: float | None = None,
) -> Divergences:
    """`token_scores`, and from the same pass what compares the distribution with another model's. ValueError where the reference
    has other rows than this model, or `top_k` is more than the vocabulary.

    Args:
        reference: its (N, H') states and (V/ranks, H') rows of its output layer, cut as `weight` is: the exact KL to it, which is
            differentiable in hidden and weight and has no gradient for the reference. `softcap` is its, too.
        at: (N, K) token ids, in a row each once, whose log-probs and rest are wanted, differentiable.
        top_k: how many of the likeliest tokens are wanted, without gradient.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to take log-probs at it, not {temperature}")
    if top_k > vocabulary:
        raise ValueError(f"top_k is {top_k}, and the vocabulary has {vocabulary} tokens")
    ref_hidden, ref_weight = reference or (None, None)
    if ref_hidden is not None and ref_weight is not None:
        if len(ref_hidden) != len(hidden) or len(ref_weight) != len(weight):
            got, want = (len(ref_hidden), len(ref_weight)), (len(hidden), len(weight))
            raise ValueError(f"the reference has {got} (tokens, rows of the output layer), and this model {want}")
        ref_hidden, ref_weight = ref_hidden.detach().to(ref_weight.dtype), ref_weight.detach()
    first = weight.shape[0] * (dist.get_rank(group) if group is not None else 0)
    split = _Split(first, max(0, min(weight.shape[0], vocabulary - first)), group)
    wanted = targets[:, None] if at is None else torch.cat([targets[:, None], at], dim=1)
    log_probs, entropy, kl, p2, ids, top_log_probs, log_rest = _Head.apply(
        hidden.to(weight.dtype),
        weight,
        wanted,
        ref_hidden,
        ref_weight,
        _Options(split, temperature, chunk, sum_p2, top_k, softcap),
    )
    at_log_probs = None if at is None else log_probs[:, 1:]
    return Divergences(TokenScores(log_probs[:, 0], entropy, p2), kl, at_log_probs, ids, top_log_probs, log_rest)


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

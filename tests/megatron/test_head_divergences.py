"""KL to a reference out of the head's own pass, against materialised logits: exact, and over the reference's likeliest tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.algorithms.divergence import full_kl, top_k_kl
from megarl.bridge.model_map import padded
from tests.distributed import run_ranks
from tests.megatron.test_head import N, V, assert_close, inputs

REF_H, K = 6, 5  # the reference may be narrower


def reference() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return 0.3 * torch.randn(N, REF_H, generator=g), torch.randn(V, REF_H, generator=g)


def by_autograd(kind: str, temperature: float, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """KL, d/d hidden, d/d weight of a random combination of KL, log-probs and entropy."""
    hidden, weight, targets, a, b = inputs()
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    ref_hidden, ref_weight = (x.to(dtype) for x in reference())
    logits, ref_logits = hidden @ weight.t(), ref_hidden @ ref_weight.t()
    log_p, log_q = (torch.log_softmax(x / temperature, -1) for x in (logits, ref_logits))
    if kind == "full":
        kl = full_kl(logits, ref_logits, temperature=temperature)
    else:
        ids = log_q.topk(K).indices
        p, q = log_p.exp(), log_q.exp()
        kept = [(p[n, i] * (log_p[n, i] - log_q[n, i])).sum() for n, i in enumerate(ids)]
        rest = [(1 - p[n, i].sum(), 1 - q[n, i].sum()) for n, i in enumerate(ids)]
        kl = torch.stack([x + r * (r / s).log() for x, (r, s) in zip(kept, rest, strict=True)])
    entropy = -(log_p.exp() * log_p).sum(-1)
    (a @ kl.to(a) + b @ log_p.gather(1, targets[:, None])[:, 0].to(b) + 0.3 * entropy.sum()).backward()
    return [kl.detach(), hidden.grad, weight.grad]


def by_head(kind: str, temperature: float, chunk: int, rank: int = 0, world: int = 1) -> list[torch.Tensor]:
    """The same on one of the ranks that share the vocabulary."""
    from megarl.megatron.head import divergences

    hidden, weight, targets, a, b = inputs()
    ref_hidden, ref_weight = reference()
    share = padded(V, world) // world
    own, ref_own = torch.full((share, hidden.shape[1]), 9.0), torch.full((share, REF_H), 9.0)
    for part, whole in ((own, weight), (ref_own, ref_weight)):
        rows = whole[rank * share : (rank + 1) * share]
        part[: len(rows)] = rows
    hidden.requires_grad_()
    own.requires_grad_()
    options: dict[str, Any] = {"vocabulary": V, "temperature": temperature, "chunk": chunk}
    options["group"] = dist.group.WORLD if world > 1 else None
    if kind == "full":
        done = divergences(hidden, own, targets, reference=(ref_hidden, ref_own), **options)
        kl = done.kl
    else:
        likeliest = divergences(ref_hidden, ref_own, targets, top_k=K, **options)
        done = divergences(hidden, own, targets, at=likeliest.top_ids, **options)
        assert not likeliest.top_log_probs.requires_grad
        kl = top_k_kl(done.at_log_probs, likeliest.top_log_probs, done.log_rest, likeliest.log_rest)
    (a @ kl + b @ done.scores.log_probs + 0.3 * done.scores.entropy.sum()).backward()
    return [kl.detach(), hidden.grad, own.grad]


@pytest.mark.parametrize("kind", ["full", "top_k"])
@pytest.mark.parametrize(("temperature", "chunk"), [(1.0, 7), (0.6, N), (1.7, 1)])
def test_against_materialised_logits(kind: str, temperature: float, chunk: int, weight_rows: int) -> None:
    got = by_head(kind, temperature, chunk)
    assert not got[2][V:].any()
    assert_close([*got[:2], got[2][:V]], by_autograd(kind, temperature))


def test_a_model_does_not_differ_from_itself() -> None:
    from megarl.megatron.head import divergences

    hidden, weight, targets, *_ = inputs()
    hidden.requires_grad_()
    mine = divergences(
        hidden, weight, targets, vocabulary=V, temperature=0.7, chunk=6, reference=(hidden, weight), top_k=K
    )
    assert not mine.kl.any()
    mine.kl.sum().backward()
    assert hidden.grad.abs().max() < 1e-5
    again = divergences(hidden, weight, targets, vocabulary=V, temperature=0.7, chunk=6, at=mine.top_ids)
    assert torch.equal(again.at_log_probs, mine.top_log_probs) and torch.equal(again.log_rest, mine.log_rest)
    assert not top_k_kl(again.at_log_probs, mine.top_log_probs, again.log_rest, mine.log_rest).any()


def test_of_peaked_distributions_the_rest_is_known() -> None:
    """The others together have a mass that float32's 1 - sum knows nothing of, and it matters: the policy gives them 1e-4."""
    from megarl.megatron.head import divergences

    v, k = 9, 4
    z = torch.full((2, v), -25.0)
    z[:, :k] = torch.tensor([3.0, 1.0, 0.0, -1.0])
    policy = torch.where(torch.arange(v) < k, z, -8.0)[:, torch.arange(v - 1, -1, -1)]
    theirs = z[:, torch.arange(v - 1, -1, -1)]
    hidden, ids = torch.eye(2), torch.zeros(2, dtype=torch.long)

    def at(logits: torch.Tensor, **options: Any) -> Any:
        return divergences(hidden, logits.t().contiguous(), ids, vocabulary=v, **options)

    likeliest = at(theirs, top_k=k)
    learned = policy.clone().requires_grad_()
    done = at(learned, at=likeliest.top_ids)
    top_k_kl(done.at_log_probs, likeliest.top_log_probs, done.log_rest, likeliest.log_rest).sum().backward()
    exact = policy.double().requires_grad_()
    kl = full_kl(exact, theirs.double())  # the others differ by a factor alone
    kl.sum().backward()
    got = top_k_kl(done.at_log_probs, likeliest.top_log_probs, done.log_rest, likeliest.log_rest)
    torch.testing.assert_close(got.detach().double(), kl.detach(), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(learned.grad.double(), exact.grad, rtol=1e-4, atol=1e-7)
    floored = top_k_kl(done.at_log_probs, likeliest.top_log_probs)
    assert float((floored - got).detach().abs().min()) > 0.1 * float(kl.detach().max())


def test_all_tokens_leave_no_rest() -> None:
    from megarl.megatron.head import divergences

    hidden, weight, targets, *_ = inputs()
    hidden.requires_grad_()
    ref_hidden, ref_weight = reference()
    theirs = divergences(ref_hidden, ref_weight, targets, vocabulary=V, top_k=V)
    done = divergences(hidden, weight, targets, vocabulary=V, at=theirs.top_ids)
    kl = top_k_kl(done.at_log_probs, theirs.top_log_probs, done.log_rest, theirs.log_rest)
    torch.testing.assert_close(kl, full_kl(hidden @ weight.t(), ref_hidden @ ref_weight.t()), rtol=1e-5, atol=1e-5)
    kl.sum().backward()
    assert hidden.grad.isfinite().all()


def test_over_fewer_outcomes_it_is_less_and_over_all_of_them_the_whole() -> None:
    hidden, weight, *_ = inputs()
    ref_hidden, ref_weight = reference()
    logits, ref_logits = hidden.double() @ weight.double().t(), ref_hidden.double() @ ref_weight.double().t()
    exact = full_kl(logits, ref_logits)
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(ref_logits, -1)
    before = torch.zeros(N, dtype=torch.float64)
    for k in (1, 5, 20, V):
        ids = log_q.topk(k).indices
        kl = top_k_kl(log_p.gather(1, ids), log_q.gather(1, ids))
        assert (kl >= before - 1e-5).all() and (kl <= exact + 1e-5).all()
        before = kl
    torch.testing.assert_close(before, exact, rtol=0, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    from megarl.megatron.head import divergences

    hidden, weight, targets, *_ = inputs()
    ref_hidden, ref_weight = reference()
    with pytest.raises(ValueError, match="the reference has"):
        divergences(hidden, weight, targets, vocabulary=V, reference=(ref_hidden, ref_weight[1:]))
    with pytest.raises(ValueError, match="top_k is 38, and the vocabulary has 37"):
        divergences(hidden, weight, targets, vocabulary=V, top_k=38)
    with pytest.raises(ValueError, match="must be one"):
        top_k_kl(torch.zeros(3, 2), torch.zeros(3, 1))


def _on_two_ranks(rank: int, world: int, port: int) -> dict[str, list[torch.Tensor]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    result = {kind: by_head(kind, 0.7, 6, rank, world) for kind in ("full", "top_k")}
    dist.destroy_process_group()
    return result


def test_a_vocabulary_split_over_two_ranks() -> None:
    first, second = run_ranks(2, _on_two_ranks)
    for kind in ("full", "top_k"):
        (kl, hidden, weight), (other, more, rest) = first[kind], second[kind]
        assert torch.equal(kl, other)
        assert_close([kl, hidden + more, torch.cat([weight, rest])[:V]], by_autograd(kind, 0.7))

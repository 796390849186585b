"""Log-probs and entropy from hidden states against plain torch: chunks, temperature, padding of the vocabulary, two ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megarl.bridge.model_map import padded
from tests.distributed import run_ranks

N, H, V = 23, 10, 37  # an odd vocabulary: its last rank has padding


def inputs(vocabulary: int = V, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=g), torch.randn(vocabulary, H, generator=g)
    targets = torch.randint(0, vocabulary, (N,), generator=g)
    targets[:2] = torch.tensor([0, vocabulary - 1])
    return hidden.to(dtype), weight.to(dtype), targets, torch.randn(N, generator=g), torch.randn(N, generator=g)


def by_autograd(
    temperature: float, dtype: torch.dtype = torch.float64, softcap: float | None = None
) -> list[torch.Tensor]:
    """log-probs, entropy, d/d hidden, d/d weight of a random combination of both."""
    hidden, weight, targets, a, b = inputs()
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (a @ log_probs.float() + b @ entropy.float()).backward()
    return [log_probs.detach(), entropy.detach(), hidden.grad, weight.grad]


def by_head(chunk: int, temperature: float, *, pad: int = 0, softcap: float | None = None) -> list[torch.Tensor]:
    from megarl.megatron.head import token_scores

    hidden, weight, targets, a, b = inputs()
    weight = torch.cat([weight, torch.full((pad, H), 100.0)])
    hidden.requires_grad_()
    weight.requires_grad_()
    options = {"vocabulary": V, "temperature": temperature, "chunk": chunk, "softcap": softcap}
    scores = token_scores(hidden, weight, targets, **options)
    (a @ scores.log_probs + b @ scores.entropy).backward()
    return [scores.log_probs.detach(), scores.entropy.detach(), hidden.grad, weight.grad]


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=1e-5 * float(y.abs().max()))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 7, N, 1000])
def test_against_autograd(chunk: int, temperature: float, weight_rows: int) -> None:
    assert_close(by_head(chunk, temperature), by_autograd(temperature))


@pytest.mark.parametrize("softcap", [1.5, 6.0, 30.0])
def test_capped_logits(softcap: float, weight_rows: int) -> None:
    """The logits' standard deviation is 3. Padding of the vocabulary, which is capped too, counts for nothing."""
    got = by_head(7, 0.6, pad=6, softcap=softcap)
    assert not got[3][V:].any()
    assert_close([*got[:3], got[3][:V]], by_autograd(0.6, softcap=softcap))


def test_padding_of_the_vocabulary_counts_for_nothing(weight_rows: int) -> None:
    got = by_head(5, 0.8, pad=6)
    assert not got[3][V:].any()
    assert_close([*got[:3], got[3][:V]], by_autograd(0.8))


def test_a_target_of_certainty() -> None:
    """Probability 1 and its opposite: entropy 0, no NaN in values or gradients."""
    from megarl.megatron.head import token_scores

    hidden = torch.full((2, 1), 500.0, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    scores = token_scores(hidden, weight, torch.tensor([0, 1]), vocabulary=3)
    (scores.log_probs.sum() + scores.entropy.sum()).backward()
    assert scores.log_probs.tolist() == [0.0, -1000.0] and scores.entropy.tolist() == [0.0, 0.0]
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_no_tokens() -> None:
    from megarl.megatron.head import token_scores

    hidden, weight = torch.zeros(0, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    scores = token_scores(hidden, weight, torch.zeros(0, dtype=torch.long), vocabulary=V)
    (scores.log_probs.sum() + scores.entropy.sum()).backward()
    assert scores.log_probs.shape == (0,) and not weight.grad.any() and hidden.grad.shape == (0, H)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_sum_of_squared_probabilities(temperature: float) -> None:
    from megarl.megatron.head import token_scores

    hidden, weight, targets, a, _ = inputs()
    weight = torch.cat([weight, torch.full((5, H), 100.0)]).requires_grad_()
    options = {"vocabulary": V, "temperature": temperature, "chunk": 7}
    plain, scores = (token_scores(hidden, weight, targets, **options, sum_p2=wanted) for wanted in (False, True))
    p = torch.softmax(hidden.double() @ weight.detach()[:V].double().t() / temperature, dim=-1)
    torch.testing.assert_close(scores.sum_p2.double(), p.square().sum(-1), rtol=1e-5, atol=0)
    assert plain.sum_p2 is None and not scores.sum_p2.requires_grad
    assert torch.equal(plain.log_probs, scores.log_probs) and torch.equal(plain.entropy, scores.entropy)
    gradients = [torch.autograd.grad(a @ s.log_probs, weight)[0] for s in (plain, scores)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_at_which_there_is_no_distribution(temperature: float) -> None:
    from megarl.megatron.head import token_scores

    hidden, weight, targets, *_ = inputs()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_scores(hidden, weight, targets, vocabulary=V, temperature=temperature)


def test_bfloat16_weights_give_float32_scores() -> None:
    from megarl.megatron.head import token_scores

    hidden, weight, targets, *_ = inputs(dtype=torch.bfloat16)
    scores = token_scores(hidden.requires_grad_(), weight.requires_grad_(), targets, vocabulary=V, chunk=4)
    scores.log_probs.sum().backward()
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert (scores.log_probs.detach() - by_autograd(1.0)[0]).abs().max() < 0.2


def _on_two_ranks(rank: int, world: int, port: int) -> list[Any]:
    from megarl.megatron import head

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    hidden, weight, targets, a, b = inputs()
    share = padded(V, world) // world
    own = torch.zeros(share, H)
    rows = weight[rank * share : (rank + 1) * share]
    own[: len(rows)] = rows
    hidden.requires_grad_()
    own.requires_grad_()
    scores = head.token_scores(
        hidden, own, targets, vocabulary=V, temperature=0.7, chunk=6, group=dist.group.WORLD, sum_p2=True
    )
    with patch.object(head, "_WEIGHT_ROWS", 8):
        (a @ scores.log_probs + b @ scores.entropy).backward()
    dist.destroy_process_group()
    return [scores.log_probs.detach(), scores.entropy.detach(), hidden.grad, own.grad, scores.sum_p2]


def test_a_vocabulary_split_over_two_ranks() -> None:
    first, second = run_ranks(2, _on_two_ranks)
    for one, other in zip(first[:2], second[:2], strict=True):
        assert torch.equal(one, other)
    assert not second[3][V - 19 :].any()  # 19 rows a rank, the last one padding
    whole = torch.cat([first[3], second[3]])[:V]
    assert_close([first[0], first[1], first[2] + second[2], whole], by_autograd(0.7))
    hidden, weight, *_ = inputs()
    assert_close([first[4], second[4]], [torch.softmax(hidden @ weight.t() / 0.7, dim=-1).square().sum(-1)] * 2)

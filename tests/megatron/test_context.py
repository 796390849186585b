"""Context parallelism: the pieces of a packed row are the row, work is even, and attention over pieces is attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.batch import Batch
from megarl.batch.packing import Packed, cut, pack
from tests.distributed import run_ranks
from tests.megatron.harness import random_batch
from tests.megatron.test_layers import SIZE, layer, naive
from tests.megatron.test_packing import batch_of


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    import megarl.megatron  # noqa: F401  (re-targets megatron.core where there is no CUDA)


def pieces_of(batch: Batch, ranks: int, multiple: int = 1) -> tuple[Packed, list[Packed]]:
    whole = pack(batch, share_prompts=True, multiple=multiple, context=ranks)
    return whole, [cut(whole, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_predicted_on_one_rank_from_what_stands_before_it(seed: int, ranks: int, multiple: int) -> None:
    batch = random_batch(50, seed=seed)
    whole, pieces = pieces_of(batch, ranks, multiple)
    lengths = {len(piece.tokens) for piece in pieces}
    assert len(lengths) == 1 and lengths.pop() % multiple == 0
    assert torch.equal(
        torch.cat([p.piece.rows[r] for r, p in enumerate(pieces)]).sort()[0], torch.arange(len(whole.tokens))
    )
    assert int(whole.real.sum()) == int((batch.total_lengths - 1).clamp(min=1).sum())

    told = {}
    for rank, piece in enumerate(pieces):
        own = piece.piece.rows[rank]
        for name in ("tokens", "positions", "real"):
            assert torch.equal(getattr(piece, name), getattr(whole, name)[own])
        for at, target, slot in zip(
            piece.predicts.tolist(), piece.targets.tolist(), piece.piece.slots.tolist(), strict=True
        ):
            (segment,) = (s for s in piece.segments if s.start <= at < s.start + s.length)
            seen = [*range(*_span(segment.prefix)), *range(segment.keys, segment.keys + at - segment.start + 1)]
            assert slot not in told
            told[slot] = (whole.tokens[seen].tolist(), whole.positions[seen].tolist(), target)
    want = []
    for row, prompt in zip(
        batch["tokens"].split(batch.total_lengths.tolist()), batch.prompt_lengths.tolist(), strict=True
    ):
        want += [(row[:i].tolist(), list(range(i)), int(row[i])) for i in range(prompt, len(row))]
    assert [told[slot] for slot in range(len(want))] == want and len(told) == len(want)


def _span(prefix: tuple[int, int] | None) -> tuple[int, int]:
    return (prefix[0], sum(prefix)) if prefix else (0, 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_work_is_even(ranks: int) -> None:
    """Keys seen, summed over queries."""
    _, pieces = pieces_of(random_batch(50, groups=6), ranks)
    work = [
        sum(s.length * (s.prefix[1] if s.prefix else 0) + s.length * (s.length + 1) // 2 for s in p.segments)
        for p in pieces
    ]
    assert len(set(work)) == 1


def test_a_micro_batch_without_samples_is_padding() -> None:
    nothing = random_batch(50).take(torch.zeros(0, dtype=torch.long))
    for ranks, multiple in ((1, 1), (1, 4), (2, 1), (2, 2), (3, 2)):
        whole = pack(nothing, share_prompts=True, multiple=multiple, context=ranks)
        assert not whole.real.any() and len(whole.segments) == 1 and len(whole.predicts) == len(whole.targets) == 0
        assert len(whole.tokens) % (multiple * ranks) == 0 and len(whole.tokens) <= 2 * multiple * ranks
        if ranks > 1:
            assert len(cut(whole, ranks - 1, ranks).tokens) == len(whole.tokens) // ranks


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_over_pieces_is_attention(ranks: int, window: int | None) -> None:
    batch = batch_of(([1] * 30, [2] * 11), ([3], [4]), ([5] * 7, [6] * 20), ([7] * 29, [8] * 9), ([1, 2], [3] * 4))
    whole, pieces = pieces_of(batch, ranks)
    total = len(whole.tokens)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(total, n, SIZE, generator=g, dtype=torch.float64) for n in (6, 2, 2))
    weight = torch.randn(total, 6 * SIZE, generator=g, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = naive(whole.segments, total, *leaves, SIZE**-0.5, window)
    (want * weight).sum().backward()

    from megarl.cpu.layers import AttentionPlan

    core, again = layer(window=window), [x.clone().requires_grad_() for x in (q, k, v)]
    for rank, piece in enumerate(pieces):
        own = piece.piece.rows[rank]
        plan = AttentionPlan(piece.segments, len(own), q.dtype, q.device, piece.piece.rows, window)
        # On one process, so that keys and values of all ranks are at hand.
        out = core(again[0][own], *again[1:], None, packed_seq_params=SimpleNamespace(plan=plan))
        torch.testing.assert_close(out, want[own].detach(), rtol=1e-5, atol=2e-6)
        (out * weight[own]).sum().backward()
    for got, leaf in zip(again, leaves, strict=True):
        torch.testing.assert_close(got.grad, leaf.grad, rtol=1e-5, atol=2e-6)


def test_rows_are_gathered_and_their_gradients_come_home() -> None:
    ranks = 3
    for rank, (whole, gradient) in enumerate(run_ranks(ranks, _gather)):
        assert torch.equal(whole, torch.arange(4.0 * ranks)[:, None].expand(-1, 2).bfloat16())
        # Rank s weighed row i with i + 100·s + 0.001; in bfloat16 the sum is rounded once.
        rows = _rows(ranks)[rank].float()
        sent = [(rows + 100 * s + 0.001).bfloat16().float() for s in range(ranks)]
        assert torch.equal(gradient[:, 0], torch.stack(sent).sum(0).bfloat16())


def _rows(ranks: int) -> torch.Tensor:
    return torch.randperm(4 * ranks, generator=torch.Generator().manual_seed(ranks)).view(ranks, 4)


def _gather(rank: int, world: int, port: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch.distributed as dist

    from megarl.cpu.context import gather_rows

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    own = _rows(world)[rank]
    x = own[:, None].expand(-1, 2).bfloat16().requires_grad_()
    whole = gather_rows(x, _rows(world), dist.group.WORLD)
    weight = (torch.arange(4 * world) + 100 * rank + 0.001).bfloat16()
    (whole * weight[:, None]).sum().backward()
    answer = whole.detach(), x.grad
    dist.destroy_process_group()
    return answer


def test_transformer_engine_is_told_the_bounds_of_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """It deals chunks out itself, and so does Megatron with the rotary angles: from lengths that are multiples of 2·ranks."""
    from megarl.megatron import model

    monkeypatch.setattr(model, "uses_transformer_engine", lambda: True)
    batch = batch_of(([1] * 30, [2] * 11), ([3], [4]), ([5] * 7, [6] * 20))
    _, pieces = pieces_of(batch, 2, multiple=3)
    for piece in pieces:
        params = model.packed_params(piece, SimpleNamespace(params_dtype=torch.bfloat16, window_size=None))
        assert not isinstance(params, model.LocalPackedSeqParams)
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 40, 44, 72]
        assert params.max_seqlen_q == params.max_seqlen_kv == 40 and len(piece.tokens) == 36

"""The losses that keep experts in use, against their definition; the router's choices, against transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.megatron.experts import RoutedRow, balancing_losses
from megarl.models.tiny import make_tiny
from tests.distributed import free_port, run_ranks
from tests.megatron.expert_jobs import balancing, balancing_reference, choices
from tests.megatron.harness import Layout
from tests.megatron.layouts import Job

EXPERTS, CHOSEN = 7, 3
LENGTHS = (5, 1, 8, 3)
WEIGHTS = torch.tensor([0.25, 0.25, 0.0, 0.25])  # the third sequence has no loss


def by_definition(logits: Tensor, chosen: Tensor, kind: str, balance: float, z: float) -> Tensor:
    """Sequence by sequence, expert by expert, as the formula is written."""
    total = logits.new_zeros(())
    start = 0
    for weight, length in zip(WEIGHTS.tolist(), LENGTHS, strict=True):
        x, c = logits[start : start + length], chosen[start : start + length]
        start += length
        p = torch.softmax(x, -1) if kind == "softmax" else torch.sigmoid(x) / torch.sigmoid(x).sum(-1, keepdim=True)
        f = [EXPERTS / (CHOSEN * length) * float(c[:, i].sum()) for i in range(EXPERTS)]
        loss = sum(f[i] * p[:, i].mean() for i in range(EXPERTS))
        total = total + weight * (balance * loss + z * torch.logsumexp(x, -1).square().mean())
    return total


def balancing_loss(logits: Tensor, chosen: Tensor, row: RoutedRow, kind: str, *, balance: float, z: float) -> Tensor:
    return balancing_losses(logits, chosen, row, kind) @ logits.new_tensor([balance, z])


def row_of(logits: Tensor) -> tuple[Tensor, RoutedRow]:
    chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter_(1, logits.topk(CHOSEN).indices, True)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return chosen, RoutedRow(sequence, WEIGHTS)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_losses_and_their_gradient_are_the_formula(kind: str) -> None:
    logits = torch.randn(sum(LENGTHS), EXPERTS, dtype=torch.float64, requires_grad=True)
    chosen, row = row_of(logits)
    row = RoutedRow(row.sequence, row.weights.double())
    for balance, z in ((0.3, 0.0), (0.0, 0.2), (0.3, 0.2)):
        ours = balancing_loss(logits, chosen, row, kind, balance=balance, z=z)
        theirs = by_definition(logits, chosen, kind, balance, z)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
        gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-15)
        assert gradients[0].abs().max() > 1e-4


def test_rows_of_no_sequence_change_nothing() -> None:
    """Rows that fill up to a multiple, and a micro-batch of nothing else."""
    logits = torch.randn(sum(LENGTHS), EXPERTS)
    chosen, row = row_of(logits)
    plain = balancing_loss(logits, chosen, row, "softmax", balance=0.3, z=0.2)
    padding = torch.full((4,), len(LENGTHS))
    longer = torch.cat([logits, 50 * torch.randn(4, EXPERTS)]).requires_grad_()
    more = torch.cat([chosen, torch.ones(4, EXPERTS, dtype=torch.bool)])
    padded = balancing_loss(
        longer, more, RoutedRow(torch.cat([row.sequence, padding]), WEIGHTS), "softmax", balance=0.3, z=0.2
    )
    torch.testing.assert_close(padded, plain)
    assert torch.autograd.grad(padded, longer)[0][-4:].abs().max() == 0
    nothing = balancing_loss(
        torch.randn(2, EXPERTS),
        torch.ones(2, EXPERTS),
        RoutedRow(torch.zeros(2, dtype=torch.long), torch.zeros(0)),
        "softmax",
        balance=0.3,
        z=0.2,
    )
    assert float(nothing) == 0.0


def test_however_the_sequences_are_cut_the_sum_is_the_same() -> None:
    logits = torch.randn(sum(LENGTHS), EXPERTS)
    chosen, row = row_of(logits)
    whole = balancing_loss(logits, chosen, row, "sigmoid", balance=0.3, z=0.2)
    parts = logits.new_zeros(())
    for members in ((0, 2), (3,), (1,)):
        here = torch.cat([torch.nonzero(row.sequence == member)[:, 0] for member in members])
        numbers = torch.cat([torch.full((LENGTHS[member],), i) for i, member in enumerate(members)])
        cut = RoutedRow(numbers, WEIGHTS[list(members)])
        parts = parts + balancing_loss(logits[here], chosen[here], cut, "sigmoid", balance=0.3, z=0.2)
    torch.testing.assert_close(parts, whole)


def test_the_router_chooses_as_transformers_does(tmp_path: Path) -> None:
    """Every token's experts and their weights, layer by layer; and the router's bias stays float32 in a bfloat16 model."""
    families = ("qwen3-moe", "deepseek", "deepseek-v2", "mixtral")
    folders = [str(make_tiny(family, tmp_path / family)) for family in families]
    (reports,) = run_ranks(1, choices, folders, [free_port() for _ in folders])
    for family, report in zip(families, reports, strict=True):
        assert report["layers"] == (3 if family.startswith("deepseek") else 4)
        assert report["differing choices"] == 0
        assert report["tokens"] > 50
        assert report["weights"] < 1e-5
        assert report["bias dtype"] == ("torch.float32" if family == "deepseek" else "none")
        assert report["bias lost"] == 0.0


BALANCING = {
    "one rank": Layout(),
    "small micro-batches": Layout(micro_batch_tokens=20),
    "recomputed": Layout(recompute="full", micro_batch_tokens=40),
    "tp2 sp": Layout(tensor=2, sequence=True, micro_batch_tokens=40),
    "pp2": Layout(pipeline=2, micro_batch_tokens=30),
    "cp2": Layout(context=2, micro_batch_tokens=40),
    "ep2": Layout(data=2, expert=2, shuffled=True, micro_batch_tokens=30),
    "ep2, a rank without samples": Layout(data=2, expert=2, lopsided=True, micro_batch_tokens=40),
}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_balancing_losses_are_the_same_under_every_split(
    world: int, tmp_path: Path, record_invariant: Callable[[str, float, float], None]
) -> None:
    """Their gradient, of every parameter, and their values as reported: what transformers' routers give by the definition, sequence
    by sequence."""
    wanted = [(f, n) for f in ("qwen3-moe", "deepseek") for n, layout in BALANCING.items() if layout.world == world]
    files = {family: tmp_path / f"{family}.pt" for family, _ in wanted}
    for family, file in files.items():
        balancing_reference(make_tiny(family, tmp_path / family), file)
    jobs = [Job(BALANCING[n], str(tmp_path / f), str(files[f]), free_port()) for f, n in wanted]
    ranks = run_ranks(world, balancing, jobs)
    for at, (family, name) in enumerate(wanted):
        found = [answers[at]["gradients"] for answers in ranks]
        names = {tensor for answer in found for tensor in answer}
        assert names == set(torch.load(files[family], weights_only=False)["gradients"])
        worst = max(distance for answer in found for distance, _ in answer.values())
        record_invariant(f"{family}, {name}: balancing losses, worst of all gradients, relative", worst, 1e-5)
        said, want = (
            (answers[at]["losses"] for answers in ranks),
            torch.load(files[family], weights_only=False)["losses"],
        )
        sums = [sum(values) for values in zip(*(s for s in said if s is not None), strict=True)]
        off = max(abs(a / b - 1) for a, b in zip(sums, want, strict=True))
        record_invariant(f"{family}, {name}: balancing losses as reported, relative", off, 1e-5)

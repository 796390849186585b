"""Drawing from probabilities: the right distribution, and never what has none."""

import pytest
import torch

from megarl.cpu.sampling import BLOCK, FEW, draw, fractions, likely


def some(probs, start=0):
    """Another request a row; `start`: the first one's seed."""
    seeds = torch.arange(start, start + len(probs))
    return draw(probs, fractions(seeds, torch.full_like(seeds, 7)))


@pytest.mark.parametrize("size", [5, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 1000])
def test_frequencies_follow_the_probabilities(size):
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(size) * 2, 0)
    rows, rounds = 20000, 5
    many = probs.expand(rows, size).contiguous()
    counts = sum(torch.bincount(some(many, start), minlength=size) for start in range(0, rounds * rows, rows))
    total = rows * rounds
    deviation = (counts - total * probs) / (total * probs * (1 - probs)).sqrt()
    assert deviation[probs * total > 10].abs().max() < 5
    assert deviation[probs * total > 10].square().mean() < 1.5  # chi-squared a degree of freedom
    assert counts.sum() == total


def test_zero_is_never_drawn_and_rows_are_independent():
    torch.manual_seed(1)
    probs = torch.zeros(300, 700)
    only = torch.randint(0, 700, (300,))
    probs[torch.arange(300), only] = torch.rand(300) * 1e-30 + 1e-38
    for start in range(5):
        assert torch.equal(some(probs, start), only)
    sparse = torch.rand(64, 49152) * (torch.rand(64, 49152) < 0.001)
    for start in range(20):
        assert (sparse.gather(1, some(sparse, start)[:, None]) > 0).all()


def test_one_certain_token_at_either_end():
    probs = torch.zeros(2, 2 * BLOCK + 3)
    probs[0, 0] = probs[1, -1] = 1.0
    assert some(probs).tolist() == [0, 2 * BLOCK + 2]


def test_fractions_are_uniform_and_of_seed_and_position_alone():
    seeds, positions = torch.meshgrid(torch.arange(300) * 7919 - 5 * 10**17, torch.arange(400), indexing="ij")
    found = fractions(seeds.flatten(), positions.flatten())
    assert found.min() >= 0 and found.max() < 1 and len(found.unique()) == len(found)
    counts = torch.histc(found, 100, 0, 1)
    assert ((counts - 1200).square() / 1200).mean() < 1.5  # chi-squared a degree of freedom
    rows = found.view(300, 400)
    for neighbours in (rows[:, 1:] - rows[:, :-1], rows[1:] - rows[:-1]):  # a triangle's variance, 1 / 6
        assert abs(float(neighbours.var()) - 1 / 6) < 5e-3
    assert torch.equal(fractions(seeds[3], positions[3]), rows[3])


@pytest.mark.parametrize("size", [7, FEW, 3 * FEW + 5])
@pytest.mark.parametrize("flat", [0.02, 1.0, 4.0])
def test_what_is_left_out(size, flat):
    """Against the definition, token by token; flat distributions keep more than the few that are looked for first."""
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(12, size) * flat, -1)
    top_k = torch.tensor([1, 3, size, FEW + 9, 1 << 30, 2] * 2)
    top_p = torch.tensor([1.0, 0.3, 0.95, 0.5, 1.0, 0.999] * 2)
    min_p = torch.tensor([0.0] * 6 + [0.5, 0.01, 0.3, 0.0, 0.9, 0.2])
    found = likely(probs, top_k, top_p, min_p)
    for row in range(12):
        before, kept = 0.0, torch.zeros(size)
        ids = probs[row].argsort(descending=True).tolist()
        for rank, token in enumerate(ids):
            p = float(probs[row, token])
            near = abs(before - float(top_p[row])) < 1e-6  # float32 sums may fall on either side
            if rank < top_k[row] and before <= top_p[row] and p >= float(probs[row, ids[0]] * min_p[row]):
                kept[token] = p if not near else found[row, token]
            before += p
        assert torch.equal(found[row], kept)
    assert torch.equal(likely(probs, top_k, top_p), likely(probs, top_k, top_p, torch.zeros(12)))


def test_nothing_to_draw_from():
    assert draw(torch.zeros(0, 3 * BLOCK), torch.zeros(0)).shape == (0,)

"""Drawing from probabilities: the right distribution, and never what has none."""

import pytest
import torch

from megarl.cpu.sampling import BLOCK, draw


@pytest.mark.parametrize("size", [5, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 1000])
def test_frequencies_follow_the_probabilities(size):
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(size) * 2, 0)
    rows, rounds = 20000, 5
    counts = sum(torch.bincount(draw(probs.expand(rows, size).contiguous()), minlength=size) for _ in range(rounds))
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
    for _ in range(5):
        assert torch.equal(draw(probs), only)
    sparse = torch.rand(64, 49152) * (torch.rand(64, 49152) < 0.001)
    for _ in range(20):
        assert (sparse.gather(1, draw(sparse)[:, None]) > 0).all()


def test_one_certain_token_at_either_end():
    probs = torch.zeros(2, 2 * BLOCK + 3)
    probs[0, 0] = probs[1, -1] = 1.0
    assert draw(probs).tolist() == [0, 2 * BLOCK + 2]

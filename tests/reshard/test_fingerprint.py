"""The fingerprint is linear over any rectangular partition, exact, and sees every fault that a sync can have."""

import itertools
import random

import pytest
import torch

from megarl.reshard.fingerprint import combine, fingerprint, partial

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]


def some(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(shape, generator=generator, dtype=torch.float64) * 60
    return data.abs().to(dtype) if dtype == torch.uint8 else data.to(dtype)


def cuts(size, rng):
    inner = sorted(rng.sample(range(1, size), k=min(size - 1, rng.randint(0, 3)))) if size > 1 else []
    edges = [0, *inner, size]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (1,), (5, 9), (13, 6), (3, 5, 7), (2, 3, 1, 11)])
def test_partial_sums_of_any_partition_add_up(dtype, shape):
    rng = random.Random(repr((dtype, shape)))
    tensor = some(shape, dtype)
    whole = fingerprint(tensor)
    for _ in range(5):
        regions = itertools.product(*(cuts(size, rng) for size in shape))
        parts = [
            partial(tensor[tuple(slice(*cut) for cut in region)], [cut[0] for cut in region]) for region in regions
        ]
        rng.shuffle(parts)
        assert combine(parts) == whole


def test_blocks_and_layout_do_not_matter(monkeypatch):
    tensor = some((300, 70), torch.bfloat16)
    whole = fingerprint(tensor)
    assert fingerprint(tensor.t().contiguous().t()) == whole  # strided memory, same values
    unaligned = torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(300, 70)
    assert fingerprint(unaligned) == whole
    monkeypatch.setattr("megarl.reshard.fingerprint._BLOCK_WORDS", 100)
    assert fingerprint(tensor) == whole


def test_known_values_hold_for_ever():
    """A fingerprint is compared between processes, and one day between machines: its definition must not drift."""
    assert fingerprint(torch.zeros(3, 4)) == 0
    assert fingerprint(torch.arange(12, dtype=torch.float32).view(3, 4)) == KNOWN_FLOAT
    assert fingerprint(torch.arange(5, dtype=torch.uint8)) == KNOWN_BYTES


KNOWN_FLOAT, KNOWN_BYTES = 5286441886651777024, 9720455418603166464


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planted_faults_show(dtype):
    square = some((24, 24), dtype)
    whole = fingerprint(square)
    faults = {
        "transposed": square.t(),
        "zeroed": torch.zeros_like(square),
        "rows swapped": square[[1, 0, *range(2, 24)]],
        "columns swapped": square[:, [1, 0, *range(2, 24)]],
        "rolled": square.roll(1, 0),
        "halves swapped": torch.cat([square[12:], square[:12]]),
        "stale": some((24, 24), dtype, seed=1),
        "other dtype": square.to(torch.float16),
        "reshaped": square.reshape(12, 48),
    }
    for name, fault in faults.items():
        assert fingerprint(fault) != whole, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_single_bit_shows(dtype):
    tensor = some((3, 8), dtype)
    whole = fingerprint(tensor)
    raw = tensor.view(torch.uint8)
    for row, byte, bit in itertools.product(range(3), range(raw.shape[1]), range(8)):
        raw[row, byte] ^= 1 << bit
        assert fingerprint(tensor) != whole, (row, byte, bit)
        raw[row, byte] ^= 1 << bit
    assert fingerprint(tensor) == whole


def test_empty_scalar_and_wrong_origin():
    assert fingerprint(torch.empty(0, 4)) == 0
    assert fingerprint(torch.tensor(2.0)) == fingerprint(torch.tensor([2.0])) != 0
    assert fingerprint(torch.tensor([float("nan"), 1.0])) != fingerprint(torch.tensor([float("nan"), 2.0]))
    with pytest.raises(ValueError, match="origin"):
        partial(torch.zeros(2, 2), (0,))

"""SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195) on int64 tensors, whose arithmetic wraps: pseudo-random
bits that are a function of a counter, the same on every device."""

from __future__ import annotations

import torch


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """As of unsigned numbers; torch shifts signed ones arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


STEP = _signed(0x9E3779B97F4A7C15)  # between two states of one generator


def mixed(x: torch.Tensor) -> torch.Tensor:
    """The output of the generator whose state is x: every bit in changes about half of the bits out."""
    x = (x ^ shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)

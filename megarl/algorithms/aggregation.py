"""From one value a token to one number a mini-batch, the same however the mini-batch is cut.

A piece (a micro-batch, on a data-parallel rank) gives its part of the sum; the one divisor is of the whole mini-batch.
So the parts add up to the loss, with nothing to reweight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.bits import keep
from megarl.algorithms.checks import check_number, check_shapes
from megarl.algorithms.masking import as_mask

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")


@dataclass(frozen=True)
class Denominators:
    """Counts over a whole mini-batch: every micro-batch of every data-parallel rank. ValueError on what no mini-batch has."""

    tokens: float  # unmasked tokens
    sequences: float  # sequences with at least one of them
    max_length: float  # the length that seq_mean_token_sum_norm divides by

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "max_length"):
            check_number(f"denominators: {name}", getattr(self, name), least=0)
        if self.tokens and not (self.sequences and self.max_length):
            raise ValueError(f"{self}: where there are tokens, sequences and max_length must be above 0")

    def of(self, mode: str) -> float:
        """The divisor of this mode. 1 where nothing counts: the sum is 0 then, and 0 is the loss."""
        divisor = {
            "token_mean": self.tokens,
            "token_sum": 1.0,
            "seq_mean_token_sum": self.sequences,
            "seq_mean_token_mean": self.sequences,
            "seq_mean_token_sum_norm": self.sequences * self.max_length,
        }
        check_mode(mode)
        return divisor[mode] or 1.0


def check_mode(mode: str) -> None:
    """ValueError on what is none of AGGREGATIONS."""
    if mode not in AGGREGATIONS:
        raise ValueError(f"no aggregation {mode!r}; there are {', '.join(AGGREGATIONS)}")


def check_counted(counted: Denominators, mask_BT: Tensor) -> None:
    """ValueError where no token was counted and the piece has some: its sum would be divided by nothing at all."""
    if not counted.tokens and bool(mask_BT.any()):
        raise ValueError("the denominators count no tokens, but there are some; they must be those of this mini-batch")


def denominators(mask_BT: Tensor, max_length: int | None = None) -> Denominators:
    """Count the whole mini-batch. max_length None: the longest sequence, up to its last unmasked token, so that padding
    does not matter; Dr.GRPO takes the length that a response may have (arXiv:2503.20783, listing 1). ValueError on one below 1."""
    check_shapes(mask_BT=mask_BT)
    check_number("max_length", max_length, least=1, none=True)
    mask_BT = as_mask(mask_BT)
    if max_length is None:
        occupied = mask_BT.any(0).nonzero()
        max_length = int(occupied[-1]) + 1 if len(occupied) else 0
    return Denominators(float(mask_BT.sum()), float(mask_BT.any(-1).sum()), float(max_length))


def aggregate(loss_BT: Tensor, mask_BT: Tensor, mode: str, *, masked: bool = False) -> Tensor:
    """This piece's part of the mini-batch's sum, a scalar; `Denominators.of(mode)` divides it.

    token_mean, token_sum, seq_mean_token_sum, seq_mean_token_sum_norm: the sum over unmasked tokens.
    seq_mean_token_mean: the sum over sequences of their means. ValueError on another mode, and on shapes that differ.
    masked: the loss is 0 where masked already, and finite.
    """
    check_mode(mode)
    check_shapes(mask_BT=mask_BT, loss_BT=loss_BT)
    kept_BT = loss_BT if masked else keep(loss_BT, mask_BT)
    if mode != "seq_mean_token_mean":
        return kept_BT.sum()
    tokens_B = as_mask(mask_BT).sum(-1)
    return torch.sum(kept_BT.sum(-1) / tokens_B.clamp(min=1))

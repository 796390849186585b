"""Sums that run backwards over tokens: y_t = x_t + d y_{t+1}. In log2 steps over blocks of tokens, not token by token.

Masked tokens are skipped wherever they stand: what follows an observation in the middle of a response carries over to the
token before it, undiscounted, as if the observation were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.algorithms.masking import as_mask, working
from megarl.algorithms.rows import blocks, masked, occupied_width, unmasked

TOKENS = 64  # a block; 6 doublings. More cost more passes, fewer a longer list of blocks to carry over


def discounted_sums(values_BT: Tensor, mask_BT: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay y_n over unmasked tokens, n the next of them after t; 0 where masked. O(B T), decay in 0..1."""
    return over_tokens(lambda x: (decaying_sum(x, decay),), (values_BT,), mask_BT)[0]


def decaying_sum(values_RT: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay y_{t+1} along the last dimension, every place counting; y beyond the end is 0.

    Sums over 1, 2, 4 ... tokens within a block, then the same over the blocks' first sums with decay^64, then each
    block's carry. Only sums and products of at most two terms, so that the result is as exact as a plain loop's and does not
    depend on the precision that matrix products are set to.
    """
    rows, tokens = values_RT.shape
    if decay == 1 and values_RT.device.type == "cpu":  # on a GPU a cumsum may differ from run to run
        return _of_one_each(values_RT) if _at_most_one_each(values_RT) else values_RT.flip(-1).cumsum_(-1).flip(-1)
    width = min(TOKENS, tokens)
    count = -(-tokens // width) if width else 0
    padded_RT = pad(values_RT, (0, count * width - tokens)) if count * width > tokens else values_RT
    sums = _doubled(padded_RT.reshape(rows * count, width), decay).view(rows, count, width)
    if count > 1:
        starts = decaying_sum(sums[:, :, 0], decay**width)
        powers = torch.tensor([decay ** (width - t) for t in range(width)], dtype=sums.dtype, device=sums.device)
        sums[:, :-1].addcmul_(starts[:, 1:, None], powers)
    return sums.view(rows, count * width)[:, :tokens]


def running_sum(values_RT: Tensor) -> Tensor:
    """y_t = x_t + y_{t-1} along the last dimension."""
    if values_RT.device.type == "cpu":
        return values_RT.cumsum(-1)
    return decaying_sum(values_RT.flip(-1), 1.0).flip(-1)


def _at_most_one_each(values_RT: Tensor) -> bool:
    """Whether no row has more than one place that is not 0: rewards for whole answers, which most are."""
    return bool((unmasked(values_RT != 0) <= 1).all())


def _of_one_each(values_RT: Tensor) -> Tensor:
    """`decaying_sum` with decay 1 of such rows: the one value at its place and before."""
    if not values_RT.numel():
        return values_RT.clone()
    place_R = (values_RT != 0).view(torch.uint8).argmax(-1).to(torch.int32)
    before_RT = torch.arange(values_RT.shape[1], dtype=torch.int32) <= place_R[:, None]
    return masked(values_RT.sum(-1, keepdim=True), before_RT)


def _doubled(values: Tensor, decay: float) -> Tensor:
    """y_t = sum_{s >= t} decay^(s - t) x_s within each row, new: after each step it reaches twice as far."""
    width, reach, result = values.shape[1], 1, values
    if width < 2:
        return values.clone()
    targets = cycle((torch.empty_like(values), torch.empty_like(values)))
    while reach < width:
        target = next(targets)
        torch.add(result[:, :-reach], result[:, reach:], alpha=decay**reach, out=target[:, :-reach])
        target[:, -reach:] = result[:, -reach:]
        result = target
        reach *= 2
    return result


class Standing:
    """The unmasked tokens of each row, moved together to the left: (R, T) <-> (R, width)."""

    def __init__(self, mask_RT: Tensor):
        self.mask_RT = mask_RT
        self.width = occupied_width(mask_RT)
        self._from: Tensor | None = None  # None: they stand so already, and what is right of them is cut off
        bytes_RT = mask_RT.view(torch.uint8)
        begins_RT = bytes_RT[:, 1 : self.width] > bytes_RT[:, : max(self.width - 1, 0)]
        if begins_RT.numel() and bool(begins_RT.view(torch.uint8).amax()):  # after a hole, or where a row starts masked
            place_RT = mask_RT.cumsum(-1)
            self.length_R = place_RT[:, -1]
            self.width = int(self.length_R.max())
            self._from = mask_RT.flatten().nonzero().squeeze(-1)
            row_R = torch.arange(len(mask_RT), device=mask_RT.device)[:, None] * self.width
            self._to = (row_R + place_RT - 1).flatten()[self._from]

    def pull(self, values_RT: Tensor) -> Tensor:
        """(R, width), a new tensor in working precision, 0 right of the last token."""
        if self._from is None:
            return masked(values_RT[:, : self.width], self.mask_RT[:, : self.width])
        result = working(values_RT[:0]).new_zeros(len(values_RT), self.width)
        result.view(-1)[self._to] = working(values_RT.flatten()[self._from])
        return result

    def present(self) -> Tensor:
        """(R, width) bool: the mask of what is pulled."""
        if self._from is None:
            return self.mask_RT[:, : self.width]
        return torch.arange(self.width, device=self.mask_RT.device) < self.length_R[:, None]

    def push(self, values_RW: Tensor, out_RT: Tensor) -> Tensor:
        """out_RT, filled with values where the tokens stood, 0 where masked. The values are 0 right of the last token."""
        if self._from is None:
            out_RT[:, : self.width] = values_RW
            out_RT[:, self.width :] = 0
        else:
            moved = values_RW.new_zeros(out_RT.numel())
            moved[self._from] = values_RW.reshape(-1)[self._to]
            out_RT.copy_(moved.view_as(out_RT))
        return out_RT


@torch.no_grad()
def over_tokens(
    formula: Callable[..., Sequence[Tensor]], inputs_BT: Sequence[Tensor], mask_BT: Tensor, outputs: int = 1
) -> list[Tensor]:
    """`formula` on the inputs with masked tokens taken out, block of rows by block of rows; (B, T), 0 where masked.

    It gets new (R, W) tensors, tokens to the left, 0 right of them, and gives `outputs` of that shape, 0 there as well. Padding
    that all rows of a block share costs nothing but the zeros of the result, so one long sequence does not make the others dear.
    """
    mask_BT = as_mask(mask_BT)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in inputs_BT) else torch.float32
    results = [torch.empty(mask_BT.shape, dtype=dtype, device=mask_BT.device) for _ in range(outputs)]
    for rows, width in blocks(mask_BT):
        standing = Standing(mask_BT[rows, :width])
        values = formula(*(standing.pull(x_BT[rows, :width]).to(dtype) for x_BT in inputs_BT))
        for result_BT, value in zip(results, values, strict=True):
            standing.push(value, result_BT[rows, :width])
            result_BT[rows, width:] = 0
    return results

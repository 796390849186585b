"""Matrices in float8 by blocks (arXiv:2412.19437, sec. 3.3): what DeepSeek-V3 is published in and SGLang's fp8 engines hold.

X.weight (rows, columns) is stored as two tensors: X.weight in float8_e4m3fn, and X.weight_scale_inv in float32, a scale for each block
of 128 x 128 numbers, the last ones cut, by which its numbers are multiplied. A scale is the block's largest magnitude / 448, the
largest number of e4m3, so that nothing is out of range.

Both are made of regions of a matrix, whatever cuts them: `magnitudes` of regions go together by their maximum, and with the scales
that follow each region is quantised by itself. The bytes are those of the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.bridge.layout import Shape
from megarl.bridge.model_map import ModelMap

NUMBERS, SCALES = ".weight", ".weight_scale_inv"  # the ends of the two names
DTYPE = torch.float8_e4m3fn
BLOCK = 128
# `quantization_config` of a config.json.
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",  # what a product's other side is rounded to is found as it comes
    "weight_block_size": [BLOCK, BLOCK],
}
A_WEIGHT = DTYPE.itemsize + torch.float32.itemsize / BLOCK**2  # bytes, its share of a scale among them

_LARGEST = torch.finfo(DTYPE).max  # 448
_SMALLEST = torch.finfo(
    torch.float32
).tiny  # of scales: a smaller one has not all its bits, and GPUs may take it for zero
_AT_ONCE = 1 << 24  # numbers, for which there are float32 copies meanwhile


def quantised(model: ModelMap) -> dict[str, Shape]:
    """The matrices that SGLang has in float8 where config.json has `CONFIG`: of all linear layers, experts among them. Embedding,
    output layer, router, norms and biases stay as they are."""
    return {
        name: shape
        for parameter in model.parameters
        if parameter.exported and parameter.layer is not None and ".linear_" in parameter.name
        for name, shape in zip(parameter.hf_names, parameter.hf_shapes, strict=True)
        if len(shape) == 2 and name.endswith(NUMBERS)
    }


def scales_name(name: str) -> str:
    """Of the scales of a matrix's blocks."""
    return name.removesuffix(NUMBERS) + SCALES


def blocks(shape: Sequence[int]) -> Shape:
    """How many a matrix has along its rows and columns."""
    return tuple(-(-size // BLOCK) for size in shape)


def magnitudes(region: Tensor, origin: Sequence[int]) -> tuple[tuple[slice, slice], Tensor]:
    """The largest magnitude in each block that a region of a matrix has a part of, float32: which blocks, and (rows, columns) of them.
    Infinite where a number is not finite."""
    touched = _touched(region.shape, origin)
    found = [_in_blocks(part, at).abs().amax((1, 3)) for _, part, at in _bands(region, origin)]
    return touched, torch.cat(found).float().nan_to_num_(nan=math.inf, posinf=math.inf)


def scales_of(magnitudes_RC: Tensor) -> Tensor:
    """float32. A block of zeros has 1."""
    scales_RC = (magnitudes_RC / _LARGEST).clamp_(min=_SMALLEST)
    return scales_RC.masked_fill_(magnitudes_RC == 0, 1.0)


def quantise(region: Tensor, origin: Sequence[int], scales_RC: Tensor) -> Tensor:
    """A region of a matrix in float8_e4m3fn, of its shape: number / scale in float32, rounded to the nearest. `scales_RC`: of all the
    matrix's blocks."""
    out = torch.empty(region.shape, dtype=DTYPE, device=region.device)
    for rows, part, at in _bands(region, origin):
        scales = scales_RC[_touched(part.shape, at)]
        numbers = (_in_blocks(part.float(), at) / scales[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(DTYPE)
        top, left = (start % BLOCK for start in at)
        whole = numbers.view(numbers.shape[0] * BLOCK, -1)
        out[rows] = whole[top : top + part.shape[0], left : left + part.shape[1]]
    return out


def owned_scales(region: Sequence[slice]) -> tuple[slice, slice]:
    """The blocks whose first number lies in a region: over any partition of the matrix every block once."""
    rows, columns = (slice(-(-part.start // BLOCK), -(-part.stop // BLOCK)) for part in region)
    return rows, columns


def _touched(shape: Sequence[int], origin: Sequence[int]) -> tuple[slice, slice]:
    rows, columns = (
        slice(start // BLOCK, -(-(start + size) // BLOCK)) for start, size in zip(origin, shape, strict=True)
    )
    return rows, columns


def _bands(region: Tensor, origin: Sequence[int]) -> Iterator[tuple[slice, Tensor, tuple[int, int]]]:
    """A region from top to bottom in pieces that end where blocks do: which rows, the piece, where it begins in the matrix."""
    step = max(1, _AT_ONCE // (BLOCK * max(1, region.shape[1]))) * BLOCK
    start = 0
    while start < region.shape[0]:
        at = origin[0] + start
        stop = min(region.shape[0], start + step - at % BLOCK)
        yield slice(start, stop), region[start:stop], (at, origin[1])
        start = stop


def _in_blocks(part: Tensor, at: Sequence[int]) -> Tensor:
    """(block rows, 128, block columns, 128), filled up with zeros where blocks are cut."""
    (top, left), (rows, columns) = ((start % BLOCK for start in at), part.shape)
    bottom, right = -(top + rows) % BLOCK, -(left + columns) % BLOCK
    whole = F.pad(part, (left, right, top, bottom)) if top or left or bottom or right else part
    high, wide = whole.shape
    return whole.reshape(high // BLOCK, BLOCK, wide // BLOCK, BLOCK)

"""Checkpoints with quantised weights, read as bfloat16 where they are read, region by region.

    mxfp4   X_blocks (E, rows, G, 16) and X_scales (E, rows, G) are X (E, 32 G, rows): two 4-bit numbers a byte, the lower bits first;
            32 share a scale, which is a power of two (OCP Microscaling Formats 1.0, sec. 5.1 and 5.4). gpt-oss is published so.
    fp8     X.weight (rows, columns) in float8_e4m3fn and X.weight_scale_inv, a number for each block of `weight_block_size`, the last
            ones cut, by which its elements are multiplied (`megarl.bridge.fp8`). DeepSeek-V3 is published so.

Which tensors are quantised their names tell; the others stay as they are. Nothing is written quantised but what fp8 engines are given.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.bridge import fp8
from megarl.bridge.fields import short
from megarl.bridge.hf_io import HFReader
from megarl.errors import UserError

FIELD = "quantization_config"  # of config.json
METHODS = ("mxfp4", "fp8")
_MXFP4, _FP8 = ("_blocks", "_scales"), (fp8.NUMBERS, fp8.SCALES)
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three lower bits of four, e2m1; the fourth is the sign
_GROUP = 32  # numbers that share a scale
_BIAS = 127  # of a scale's exponent, e8m0; 255 is NaN


def method(config: Mapping[str, Any]) -> str | None:
    """How the weights are quantised; None: they are not. Raises UserError for what cannot be read."""
    said = config.get(FIELD)
    if said is None or said == {}:
        return None
    if not isinstance(said, Mapping):
        raise UserError(
            f"config.json: {FIELD} = {short(said)} must be an object that says how the weights are quantised."
        )
    kind = said.get("quant_method")
    if kind not in METHODS:
        raise UserError(
            f"config.json: weights that are quantised by {short(kind)} cannot be read, only by {' or '.join(METHODS)}: give the "
            "unquantised checkpoint."
        )
    if kind == "fp8" and said.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UserError(f"config.json: weights of the format {short(said['fmt'])} cannot be read; e4m3 can.")
    return str(kind)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the same model with its weights unquantised."""
    return {key: value for key, value in config.items() if key != FIELD}


class QuantisedReader(HFReader):
    """A folder with quantised weights under the names, shapes and dtypes of unquantised ones."""

    def __init__(self, folder: str | Path, config: Mapping[str, Any]):
        super().__init__(folder)
        ends = _MXFP4 if method(config) == "mxfp4" else _FP8
        self._block = _block_size(config) if ends is _FP8 else None
        self._pairs: dict[str, tuple[str, str]] = {}  # of what is quantised: the names of its numbers and of its scales
        for scales in self._file_of:
            stem = scales.removesuffix(ends[1])
            if stem != scales and stem + ends[0] in self._file_of:
                self._pairs[stem + ("" if ends is _MXFP4 else ends[0])] = (stem + ends[0], scales)
        inner = {name for pair in self._pairs.values() for name in pair}
        self._names = [*(name for name in self._file_of if name not in inner), *self._pairs]
        for name in self._pairs:
            self._slice(name)  # its shapes fit each other

    @property
    def names(self) -> list[str]:
        return self._names

    def _slice(self, name: str) -> Any:
        if name not in self._pairs:
            return super()._slice(name)
        numbers, scales = (super(QuantisedReader, self)._slice(stored) for stored in self._pairs[name])
        found = _Blocks(numbers, scales, self._block) if self._block else _Mxfp4(numbers, scales)
        if fault := found.fault():
            raise UserError(f"{self.folder}: {' and '.join(self._pairs[name])} are no quantised weights: {fault}.")
        return found

    def _place(self, name: str) -> tuple[str, str] | None:
        return None if name in self._pairs else super()._place(name)


class _Mxfp4:
    """With the manners of a safetensors slice."""

    def __init__(self, blocks: Any, scales: Any):
        self._blocks, self._scales = blocks, scales

    def fault(self) -> str | None:
        """Why these two are no tensor."""
        shape, kinds = self._blocks.get_shape(), (self._blocks.get_dtype(), self._scales.get_dtype())
        if kinds != ("U8", "U8"):
            return f"they are stored as {' and '.join(kinds)}, not as U8"
        if len(shape) != 4 or shape[-1] != _GROUP // 2 or self._scales.get_shape() != shape[:-1]:
            return f"their shapes are {shape} and {self._scales.get_shape()}"
        return None

    def get_shape(self) -> list[int]:
        experts, rows, groups, _ = self._blocks.get_shape()
        return [experts, groups * _GROUP, rows]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        """(experts, columns, rows) of the region, expert by expert: bytes take four times their memory while they are looked up."""
        (first, last, _), (start, stop, step), (row, end, each) = (
            part.indices(size) for part, size in zip(region, self.get_shape(), strict=True)
        )
        groups = slice(start // _GROUP, -(-stop // _GROUP))
        inner = slice(start - groups.start * _GROUP, stop - groups.start * _GROUP, step)
        out = torch.empty(
            (last - first, len(range(start, stop, step)), len(range(row, end, each))), dtype=torch.bfloat16
        )
        for place, expert in enumerate(range(first, last)):
            blocks = self._blocks[expert : expert + 1, row:end, groups][0, ::each]
            scales = self._scales[expert : expert + 1, row:end, groups][0, ::each]
            out[place] = _numbers(blocks, scales)[:, inner].t()
        return out


def _numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """(rows, G, 16) bytes and (rows, G) exponents → (rows, 32 G) bfloat16, exactly."""
    pairs, factors = _tables()
    looked_up = pairs[blocks.int()].view(torch.bfloat16)
    return looked_up.mul_(factors[scales.int()].unsqueeze(-1)).flatten(1)


@functools.cache
def _tables() -> tuple[Tensor, Tensor]:
    """Of each byte: its two numbers in bfloat16, as one of 32 bits; what it multiplies by as a scale."""
    values = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte % 16], values[byte // 16]], dim=1).view(torch.int32).flatten()
    factors = torch.tensor([*(2.0 ** (n - _BIAS) for n in range(255)), float("nan")]).bfloat16()
    return pairs, factors


class _Blocks:
    """With the manners of a safetensors slice."""

    def __init__(self, numbers: Any, scales: Any, block: tuple[int, int]):
        self._numbers, self._scales, self._block = numbers, scales, block

    def fault(self) -> str | None:
        """Why these two are no tensor."""
        shape, scales, kind = self._numbers.get_shape(), self._scales.get_shape(), self._scales.get_dtype()
        if self._numbers.get_dtype() != "F8_E4M3" or kind not in ("F32", "BF16"):
            return f"they are stored as {self._numbers.get_dtype()} and {kind}, not as F8_E4M3 and F32"
        if len(shape) != 2 or scales != [-(-size // each) for size, each in zip(shape, self._block, strict=True)]:
            return f"their shapes are {shape} and {scales}, with blocks of {self._block}"
        return None

    def get_shape(self) -> list[int]:
        shape: list[int] = self._numbers.get_shape()
        return shape

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        """Block of rows by block of rows."""
        (row, end, _), (left, right, _) = (
            part.indices(size) for part, size in zip(region, self.get_shape(), strict=True)
        )
        tall, wide = self._block
        numbers: Tensor = self._numbers[row:end, left:right]
        scales = self._scales[row // tall : -(-end // tall), left // wide : -(-right // wide)].float()
        scales = scales.repeat_interleave(wide, dim=1)[:, left % wide : left % wide + right - left]
        out = torch.empty(numbers.shape, dtype=torch.bfloat16)
        start = row
        for factors in scales:
            stop = min(start - start % tall + tall, end)
            part = slice(start - row, stop - row)
            out[part] = numbers[part].float().mul_(factors)
            start = stop
        return out


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    said = config[FIELD].get("weight_block_size")
    if (
        not isinstance(said, list | tuple)
        or len(said) != 2
        or not all(isinstance(size, int) and 0 < size < 1 << 31 for size in said)
    ):
        raise UserError(
            f"config.json: weight_block_size = {short(said)} must be two sizes; fp8 weights with one scale each cannot be read."
        )
    return said[0], said[1]

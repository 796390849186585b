"""A jagged struct of arrays: named fields over N samples of unequal length, flat at rest and on the wire.

A field has a level: one value a sample, a response token, or a token of prompt and response together. The values of
all samples lie one after another, with no padding; `padded` makes the rectangle that the algorithms want, `unpad`
undoes it. Everything is index arithmetic over the lengths, nothing loops over samples.

A batch is not changed in place: methods return a new batch that shares what it can. What was read from Ray's object
store shares that store's memory, so writing into a field's tensor would change it for every other reader.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.batch.sample import Sample

Array = np.ndarray[Any, np.dtype[Any]]


class Level(StrEnum):
    """How many values a field holds."""

    SAMPLE = "sample"  # one a sample
    RESPONSE = "response"  # one a response token
    SEQUENCE = "sequence"  # one a token of prompt and response


class Field(NamedTuple):
    """Values and their level. First dimension: samples, or tokens of all samples one after another."""

    data: Tensor | Array  # an array of objects (strings, dicts) is allowed at SAMPLE level only
    level: Level


class Batch:
    """N samples. `fields` are checked against the lengths; an error names the field.

    prompt_lengths, response_lengths: (N,) int64 tokens.
    meta: what belongs to the batch as a whole; plain picklable values.
    """

    def __init__(
        self,
        prompt_lengths: Tensor,
        response_lengths: Tensor,
        fields: Mapping[str, Field] | None = None,
        meta: Mapping[str, Any] | None = None,
    ):
        for name, lengths in (("prompt_lengths", prompt_lengths), ("response_lengths", response_lengths)):
            if lengths.dim() != 1 or lengths.dtype != torch.int64:
                raise ValueError(f"{name}: expected a 1-D int64 tensor, got {tuple(lengths.shape)} {lengths.dtype}")
            if lengths.numel() and int(lengths.min()) < 0:
                raise ValueError(f"{name}: a length is negative")
        if len(prompt_lengths) != len(response_lengths):
            raise ValueError(
                f"prompt_lengths has {len(prompt_lengths)} samples, response_lengths {len(response_lengths)}"
            )
        self.prompt_lengths = prompt_lengths
        self.response_lengths = response_lengths
        self.meta: dict[str, Any] = dict(meta or {})
        self._index_cache: dict[Any, Tensor] = {}
        self._counts = {
            Level.SAMPLE: len(prompt_lengths),
            Level.RESPONSE: int(response_lengths.sum()),
            Level.SEQUENCE: int(response_lengths.sum() + prompt_lengths.sum()),
        }
        self._fields: dict[str, Field] = {}
        for name, (data, level) in (fields or {}).items():
            self._fields[name] = self._checked(name, data, Level(level))

    # ---- what is in it

    def __len__(self) -> int:
        return self._counts[Level.SAMPLE]

    def __getitem__(self, name: str) -> Any:
        return self._field(name).data

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} ({field.level})" for name, field in self._fields.items())
        return f"Batch({len(self)} samples, {self._counts[Level.RESPONSE]} response tokens: {fields})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._fields)

    @property
    def fields(self) -> dict[str, Field]:
        return dict(self._fields)

    def level(self, name: str) -> Level:
        return self._field(name).level

    @property
    def total_lengths(self) -> Tensor:
        """(N,) tokens of prompt and response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def cu_seqlens(self) -> Tensor:
        """(N + 1,) int32: where each sequence starts in the flat SEQUENCE fields, and where the last one ends."""
        return torch.nn.functional.pad(self.total_lengths.cumsum(0), (1, 0)).to(torch.int32)

    @property
    def response_mask(self) -> Tensor:
        """(N, T) bool: True where a response token is, T the longest response (at least 1)."""
        columns_T = torch.arange(self._width(Level.RESPONSE), device=self.response_lengths.device)
        return columns_T < self.response_lengths[:, None]

    @property
    def response_positions(self) -> Tensor:
        """(response tokens,) int64: where each response token lies in the flat SEQUENCE fields."""
        if "positions" not in self._index_cache:
            starts = self.total_lengths.cumsum(0) - self.response_lengths
            self._index_cache["positions"] = _ragged_index(starts, self.response_lengths)
        return self._index_cache["positions"]

    # ---- other fields, same samples

    def set(self, name: str, data: Tensor | Array | Sequence[Any], level: Level | str) -> Batch:
        """This batch with one field added or replaced. A plain sequence at SAMPLE level becomes an array of objects."""
        if not isinstance(data, Tensor | np.ndarray):
            data = object_array(data)
        return self._with({**self._fields, name: Field(data, Level(level))})

    def select(self, names: Iterable[str]) -> Batch:
        """Only these fields, in this order."""
        return self._with({name: self._field(name) for name in _as_names(names)})

    def pop(self, names: Iterable[str]) -> Batch:
        """This batch without these fields, which must be there."""
        gone = set(_as_names(names))
        for name in gone:
            self._field(name)
        return self._with({name: field for name, field in self._fields.items() if name not in gone})

    def union(self, *others: Batch) -> Batch:
        """The fields and meta of all, over the same samples.

        A field that is in several must be equal in all of them, except that one with nothing but NaN is a blank (a
        reward not known yet) and gives way.
        """
        fields, meta = dict(self._fields), dict(self.meta)
        for other in others:
            for what in ("prompt_lengths", "response_lengths"):
                if not torch.equal(getattr(self, what), getattr(other, what)):
                    raise ValueError(f"union: {what} differ, so these are not the same samples")
            for name, field in other._fields.items():
                if name in fields and not _is_blank(fields[name].data):
                    if _is_blank(field.data):
                        continue
                    if fields[name].level != field.level or not _same(fields[name].data, field.data):
                        raise ValueError(f"union: field {name!r} is in both batches with different values")
                fields[name] = field
            _merge_meta(meta, other.meta, "union")
        return self._with(fields, meta)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with every tensor on `device`."""
        fields = {
            name: Field(data.to(device) if isinstance(data, Tensor) else data, level)
            for name, (data, level) in self._fields.items()
        }
        return Batch(self.prompt_lengths.to(device), self.response_lengths.to(device), fields, self.meta)

    # ---- other samples, same fields

    def take(self, indices: Tensor | Sequence[int]) -> Batch:
        """The samples at `indices`, in that order, any number of times each. Copies."""
        rows = torch.as_tensor(indices, device=self.prompt_lengths.device)
        if rows.numel() == 0:
            rows = rows.to(torch.int64)
        if rows.dim() != 1 or rows.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"take: expected a 1-D sequence of integers, got {tuple(rows.shape)} {rows.dtype}")
        if rows.numel() and not (0 <= int(rows.min()) and int(rows.max()) < len(self)):
            raise IndexError(f"take: an index is outside 0..{len(self) - 1}")
        index = {Level.SAMPLE: rows.to(torch.int64)}
        for level in (Level.RESPONSE, Level.SEQUENCE):
            lengths = self._lengths(level)
            starts = lengths.cumsum(0) - lengths
            index[level] = _ragged_index(starts[rows], lengths[rows])
        fields = {}
        for name, (data, level) in self._fields.items():
            at = index[level]
            picked = data.index_select(0, at) if isinstance(data, Tensor) else data[at.cpu().numpy()]
            fields[name] = Field(picked, level)
        return Batch(self.prompt_lengths[rows], self.response_lengths[rows], fields, self.meta)

    def repeat_interleave(self, k: int) -> Batch:
        """Each sample k times, repeats side by side."""
        if k < 0:
            raise ValueError(f"repeat_interleave: k is {k}")
        return self.take(torch.arange(len(self), device=self.prompt_lengths.device).repeat_interleave(k))

    def rows(self, start: int, stop: int) -> Batch:
        """Samples start..stop-1 as views, with no copy."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        bounds = {Level.SAMPLE: (start, stop)}
        for level in (Level.RESPONSE, Level.SEQUENCE):
            lengths = self._lengths(level)
            bounds[level] = (int(lengths[:start].sum()), int(lengths[:stop].sum()))
        fields = {
            name: Field(data[bounds[level][0] : bounds[level][1]], level)
            for name, (data, level) in self._fields.items()
        }
        return Batch(self.prompt_lengths[start:stop], self.response_lengths[start:stop], fields, self.meta)

    def split(self, k: int) -> list[Batch]:
        """k runs of neighbouring samples, as views; sizes differ by one at most, the larger first."""
        if k < 1:
            raise ValueError(f"split: cannot cut a batch into {k} parts")
        return [self.shard(part, k) for part in range(k)]

    def shard(self, rank: int, world: int) -> Batch:
        """The part of `split(world)` that belongs to `rank`."""
        if not 0 <= rank < world:
            raise ValueError(f"shard: rank {rank} is not in 0..{world - 1}")
        size, larger = divmod(len(self), world)
        start = rank * size + min(rank, larger)
        return self.rows(start, start + size + (rank < larger))

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """The samples of all, one batch after another. All must have the same fields; metas must not contradict."""
        if not batches:
            raise ValueError("concat: no batches")
        first = batches[0]
        meta: dict[str, Any] = {}
        for other in batches:
            _merge_meta(meta, other.meta, "concat")
            if odd := set(first.names) ^ set(other.names):
                raise ValueError(f"concat: field {min(odd)!r} is in one batch and not in another")
        fields = {name: _concat_field(name, [other._fields[name] for other in batches]) for name in first.names}
        prompt_lengths = torch.cat([other.prompt_lengths for other in batches])
        return cls(prompt_lengths, torch.cat([other.response_lengths for other in batches]), fields, meta)

    # ---- rectangles

    def padded(self, name: str, fill: float = 0) -> Tensor:
        """(N, T, ...) for a RESPONSE field, (N, L, ...) for a SEQUENCE field: the longest row wide, at least 1."""
        data, level = self._field(name)
        if level == Level.SAMPLE or not isinstance(data, Tensor):
            raise ValueError(f"padded: field {name!r} has one value a sample, there is nothing to pad")
        width = self._width(level)
        flat = data.new_full((len(self) * width, *data.shape[1:]), fill)
        flat.index_copy_(0, self._cells(level, width), data)
        return flat.view(len(self), width, *data.shape[1:])

    def unpad(self, values_BT: Tensor, level: Level | str = Level.RESPONSE) -> Tensor:
        """The flat values of a rectangle (N, at least the longest row, ...): `padded` undone, padding dropped."""
        level = Level(level)
        shape, longest = tuple(values_BT.shape), self._width(level) if self._counts[level] else 0
        if len(shape) < 2 or shape[0] != len(self) or shape[1] < longest:
            raise ValueError(f"unpad: expected ({len(self)}, at least {longest}, ...) for {level} values, got {shape}")
        return values_BT.flatten(0, 1).index_select(0, self._cells(level, shape[1]))

    # ---- samples

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], meta: Mapping[str, Any] | None = None) -> Batch:
        """Fields: tokens (SEQUENCE, int64); loss_mask, rollout_log_probs (RESPONSE, float32); token_versions (RESPONSE, int64);
        uid, group, stop_reason, payload (SAMPLE, objects); weight_version (SAMPLE, int64); reward (SAMPLE, float32, NaN
        where not known)."""
        for sample in samples:
            sample.check()
        tokens = chain.from_iterable(part for s in samples for part in (s.prompt_ids, s.response_ids))
        rewards = [float("nan") if s.reward is None else s.reward for s in samples]
        fields = {
            "tokens": Field(_flat(tokens, np.int64), Level.SEQUENCE),
            "loss_mask": Field(_flat(chain.from_iterable(s.loss_mask for s in samples), np.float32), Level.RESPONSE),
            "rollout_log_probs": Field(
                _flat(chain.from_iterable(s.rollout_log_probs for s in samples), np.float32), Level.RESPONSE
            ),
            "token_versions": Field(_flat(chain.from_iterable(map(_versions, samples)), np.int64), Level.RESPONSE),
            "weight_version": Field(_flat((s.weight_version for s in samples), np.int64), Level.SAMPLE),
            "reward": Field(_flat(rewards, np.float32), Level.SAMPLE),
        }
        for name in ("uid", "group", "stop_reason", "payload"):
            fields[name] = Field(object_array([getattr(s, name) for s in samples]), Level.SAMPLE)
        prompt_lengths = _flat((len(s.prompt_ids) for s in samples), np.int64)
        return cls(prompt_lengths, _flat((len(s.response_ids) for s in samples), np.int64), fields, meta)

    def to_samples(self) -> list[Sample]:
        """`from_samples` undone. Fields that a Sample has no place for are left behind."""
        prompts, totals = self.prompt_lengths.tolist(), self.total_lengths.tolist()
        tokens, mask, log_probs = (self[n].tolist() for n in ("tokens", "loss_mask", "rollout_log_probs"))
        versions, token_versions = self["weight_version"].tolist(), self["token_versions"].tolist()
        rewards = self["reward"].tolist()
        samples, at, response_at = [], 0, 0
        for row, (prompt, total) in enumerate(zip(prompts, totals, strict=True)):
            response = slice(response_at, response_at + total - prompt)
            samples.append(
                Sample(
                    uid=self["uid"][row],
                    group=self["group"][row],
                    prompt_ids=tokens[at : at + prompt],
                    response_ids=tokens[at + prompt : at + total],
                    loss_mask=[int(value) for value in mask[response]],
                    rollout_log_probs=log_probs[response],
                    stop_reason=self["stop_reason"][row],
                    weight_version=versions[row],
                    reward=None if math.isnan(rewards[row]) else rewards[row],
                    payload=self["payload"][row],
                    token_versions=_unless_all(versions[row], token_versions[response]),
                )
            )
            at, response_at = at + total, response.stop
        return samples

    # ---- the wire

    def __getstate__(self) -> dict[str, Any]:
        # numpy arrays leave a pickle of protocol 5 as out-of-band buffers, which Ray places in shared memory and maps
        # without a copy. A tensor would go through torch.save, with two copies, and a view would drag its whole
        # storage along.
        return {
            "prompt_lengths": _pack(self.prompt_lengths),
            "response_lengths": _pack(self.response_lengths),
            "fields": {name: (field.level.value, _pack(field.data)) for name, field in self._fields.items()},
            "meta": self.meta,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        fields = {name: Field(_unpack(packed), Level(level)) for name, (level, packed) in state["fields"].items()}
        lengths = _unpack(state["prompt_lengths"]), _unpack(state["response_lengths"])
        self.__init__(*lengths, fields, state["meta"])  # type: ignore[misc]

    # ---- inside

    def _with(self, fields: Mapping[str, Field], meta: Mapping[str, Any] | None = None) -> Batch:
        return Batch(self.prompt_lengths, self.response_lengths, fields, self.meta if meta is None else meta)

    def _field(self, name: str) -> Field:
        if name not in self._fields:
            raise KeyError(f"no field {name!r}; there are: {', '.join(self._fields) or 'none'}")
        return self._fields[name]

    def _checked(self, name: str, data: Tensor | Array, level: Level) -> Field:
        if isinstance(data, np.ndarray) and data.dtype != object:
            data = torch.from_numpy(np.ascontiguousarray(data))
        if isinstance(data, np.ndarray) and level != Level.SAMPLE:
            raise ValueError(f"field {name!r}: objects are allowed at sample level only, not at {level} level")
        if len(data.shape) == 0 or len(data) != self._counts[level]:
            values = len(data) if len(data.shape) else "a scalar instead of"
            what = {"sample": "samples", "response": "response tokens", "sequence": "tokens"}[level.value]
            hint = "; a padded rectangle goes through unpad" if len(data.shape) > 1 and level != Level.SAMPLE else ""
            raise ValueError(f"field {name!r}: {values} values, but the batch has {self._counts[level]} {what}{hint}")
        return Field(data, level)

    def _lengths(self, level: Level) -> Tensor:
        return self.response_lengths if level == Level.RESPONSE else self.total_lengths

    def _width(self, level: Level) -> int:
        return max(1, int(self._lengths(level).max())) if len(self) else 1

    def _cells(self, level: Level, width: int) -> Tensor:
        """Where each flat value goes in the flattened (N, width) rectangle."""
        if (level, width) not in self._index_cache:
            rows = torch.arange(len(self), device=self.prompt_lengths.device)
            self._index_cache[level, width] = _ragged_index(rows * width, self._lengths(level))
        return self._index_cache[level, width]


def object_array(values: Sequence[Any]) -> Array:
    """A 1-D array of the objects themselves: numpy would make a rectangle of lists of equal length."""
    return np.fromiter(values, dtype=object, count=len(values))


def _ragged_index(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, ... of every row, `length` of them, one row after another."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    index = torch.repeat_interleave(starts - ends + lengths, lengths, output_size=total)
    return index.add_(torch.arange(total, device=lengths.device))  # the sum of two fresh tensors, without a third


def _flat(values: Iterable[Any], dtype: Any) -> Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=dtype))


def _versions(sample: Sample) -> list[int]:
    return sample.token_versions or [sample.weight_version] * len(sample.response_ids)


def _unless_all(version: int, token_versions: list[int]) -> list[int]:
    return [] if all(value == version for value in token_versions) else token_versions


def _as_names(names: Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _is_blank(data: Tensor | Array) -> bool:
    return isinstance(data, Tensor) and data.is_floating_point() and data.numel() > 0 and bool(data.isnan().all())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        same_kind = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape
        return same_kind and all(map(_same, a.ravel().tolist(), b.ravel().tolist()))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _merge_meta(into: dict[str, Any], other: Mapping[str, Any], what: str) -> None:
    for key, value in other.items():
        if key in into and not _same(into[key], value):
            raise ValueError(f"{what}: meta {key!r} differs between the batches")
        into[key] = value


def _concat_field(name: str, parts: list[Field]) -> Field:
    kinds = {(part.level, part.data.dtype, tuple(part.data.shape[1:])) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"concat: field {name!r} differs in level, type or shape: {sorted(map(str, kinds))}")
    arrays = [part.data for part in parts]
    joined = torch.cat(arrays) if isinstance(arrays[0], Tensor) else np.concatenate(arrays)  # type: ignore[arg-type]
    return Field(joined, parts[0].level)


def _pack(data: Tensor | Array) -> Any:
    if not isinstance(data, Tensor):
        return data
    flat = data.detach().cpu().contiguous().reshape(-1)
    return str(data.dtype).removeprefix("torch."), tuple(data.shape), flat.view(torch.uint8).numpy()


def _unpack(packed: Any) -> Any:
    if isinstance(packed, np.ndarray):
        return packed
    dtype, shape, raw = packed
    with warnings.catch_warnings():
        # Shared memory is read-only to numpy; torch warns of it, and this module's first lines say what it means.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)

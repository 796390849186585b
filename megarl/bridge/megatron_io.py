"""A checkpoint of Megatron seen as the Hugging Face checkpoint that it is, whatever layout wrote it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megarl.bridge.dist_keys import Slot, found
from megarl.bridge.heads import BIAS, WEIGHT, Head, found_head, megatron_name
from megarl.bridge.hf_io import DTYPES
from megarl.bridge.layout import Copy, Cut, Shape
from megarl.bridge.model_map import ModelMap, Parameter
from megarl.bridge.raw_io import Run
from megarl.bridge.torch_dist import METADATA, DistReader
from megarl.bridge.torch_dist_write import altered
from megarl.errors import UserError


def standing(copy: Copy, region: Tensor) -> Tensor:
    """A view of the region `copy.hf` of a tensor as it stands in Megatron's."""
    of: Callable[[Tensor], Tensor] | None = getattr(copy, "of", None)
    return region if of is None else of(region)


def is_straight(copy: Copy) -> bool:
    """Whether a region stands in Megatron's tensor as it does in Hugging Face's."""
    turned = getattr(copy, "fused", False) or getattr(copy, "transposed", False)
    return not turned and all(s.step in (None, 1) for s in copy.hf)


class MegatronReader:
    """An `HFReader` of the tensors that a torch_dist checkpoint holds: the names, shapes and regions of Hugging Face.

    Optimizer states and what else a training run leaves there are passed over.
    """

    def __init__(self, dist: DistReader, model: ModelMap):
        self.folder, self.dist = dist.folder, dist
        self._shapes = dict(model.hf_shapes)
        # Rectangles of each Hugging Face tensor, and the keys whose rows the parameter's are.
        self._held: dict[str, list[tuple[Copy, list[Slot]]]] = defaultdict(list)
        self.missing: list[str] = []  # Megatron's names
        self.used: set[str] = set()
        wrong = []
        for parameter in model.parameters:
            slots = found(model, parameter, self.dist.tensors)
            if not slots:
                self.missing += [parameter.name] if parameter.exported else []
                continue
            self.used |= {slot.key for slot in slots}
            wrong += [fault for slot in slots if (fault := self._misshapen(parameter, slot))]
            if parameter.exported:
                for copy in parameter.copies(Cut()):
                    self._held[copy.hf_name].append((copy, slots))
        if wrong:
            raise UserError(f"{self.folder} does not fit its config.json: {'; '.join(wrong[:3])}.")

    @property
    def names(self) -> list[str]:
        return list(self._held)

    @property
    def paths(self) -> list[Path]:
        return [self.folder / file for file in self._ends()]

    def altered(self, share: int, shares: int, stop: Callable[[], bool]) -> str | None:
        """`torch_dist_write.altered` of what is read here: the optimizer's part of a file is not looked at."""
        return altered(self.folder, share, shares, weights=self._ends(), stop=stop)

    def _ends(self) -> dict[str, int]:
        """The files that hold what is read here, and how many bytes from the first on of each are needed; 0: all."""
        ends = {METADATA: 0}
        for chunk in (chunk for key in self.used for chunk in self.dist.tensors[key].chunks):
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
        return ends

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        dtypes = {self.dist.tensors[slot.key].dtype for _, slots in self._of(name) for slot in slots}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES.values()):
            said = " and ".join(str(dtype) for dtype in dtypes)
            raise UserError(
                f"{self.folder}: {name} is stored as {said}; {', '.join(map(str, DTYPES.values()))} can be read."
            )
        return dtypes.pop()

    def get(self, name: str) -> Tensor:
        return self.get_slice(name, tuple(slice(0, size) for size in self.shape(name)))

    def get_slice(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """A region of a tensor, in the checkpoint's dtype."""
        if any(s.step not in (None, 1) for s in region):  # every other row
            return self.get(name)[region]
        out = torch.empty([s.stop - s.start for s in region], dtype=self.dtype(name))
        self.read(name, region, out)
        return out

    def read(self, name: str, region: tuple[slice, ...], out: Tensor) -> None:
        """Fills `out` with a region of a tensor."""
        for copy, slots in self._of(name):
            met = tuple(
                slice(max(a.start, b.start), min(a.stop, b.stop), b.step) for a, b in zip(region, copy.hf, strict=True)
            )
            if any(s.start >= s.stop for s in met):
                continue
            place = tuple(slice(m.start - r.start, m.stop - r.start, m.step) for m, r in zip(met, region, strict=True))
            if met == copy.hf:
                self._fill(slots, copy.local, standing(copy, out[place]))
            elif is_straight(copy):
                local = tuple(
                    slice(m.start - h.start + c.start, m.stop - h.start + c.start)
                    for m, h, c in zip(met, copy.hf, copy.local, strict=True)
                )
                self._fill(slots, local, out[place])
            else:  # a part of what does not stand in Megatron's tensor as it does here
                out.copy_(self.get(name)[region])
                return

    def runs(self, name: str, region: tuple[slice, ...], dtype: torch.dtype) -> list[Run] | None:
        """Where the bytes of a whole tensor lie, run after run, if they are stored as `dtype` and as they stand in it."""
        found, row = [], 0
        for copy, slots in sorted(self._of(name), key=lambda held: held[0].hf[0].start):
            whole = all(s == full for s, full in zip(copy.hf[1:], region[1:], strict=True))
            if not is_straight(copy) or not whole or copy.hf[0].start != row:
                return None
            for _, key, inner in self._pieces(slots, copy.local):
                run = self.dist.run(key, inner) if self.dist.tensors[key].dtype == dtype else None
                if run is None:
                    return None
                found.append(run)
            row = copy.hf[0].stop
        return found if row == region[0].stop else None

    def _fill(self, slots: list[Slot], local: tuple[slice, ...], out: Tensor) -> None:
        """A region of a parameter."""
        for rows, key, inner in self._pieces(slots, local):
            self.dist.read(key, inner, out[rows])

    def _pieces(self, slots: list[Slot], local: tuple[slice, ...]) -> Iterator[tuple[slice, str, tuple[slice, ...]]]:
        """A region of a parameter, which may lie in several keys: some of its rows, and where these are."""
        rows = local[0]
        for slot in slots:
            start, stop = max(rows.start, slot.rows.start), min(rows.stop, slot.rows.stop)
            if start < stop:
                inner = (slice(start - slot.rows.start, stop - slot.rows.start), *local[1:])
                lead = tuple(slice(i, i + 1) for i in slot.index)
                yield slice(start - rows.start, stop - rows.start), slot.key, (*lead, *inner)

    def forget(self) -> None:
        """Nothing is mapped."""

    def check(self, model: ModelMap) -> None:
        """Raises UserError unless the checkpoint holds exactly the parameters that the map knows."""
        extra = [key for key in self.dist.tensors if key not in self.used and not key.startswith(_NOT_WEIGHTS)]
        parts = [
            *([f"lacks {_some(self.missing)}"] if self.missing else []),
            *([f"holds {_some(extra)}, which no rule of {model.family} knows"] if extra else []),
        ]
        if parts:
            raise UserError(f"{self.folder} does not fit its config.json: {'; '.join(parts)}.")
        for name in model.hf_shapes:
            self.dtype(name)

    def _of(self, name: str) -> list[tuple[Copy, list[Slot]]]:
        if name not in self._held:
            raise UserError(f"{self.folder} holds no tensor {name}.")
        return self._held[name]

    def _misshapen(self, parameter: Parameter, slot: Slot) -> str | None:
        """Vocabularies may be padded, as the layout that wrote them wanted it."""
        shape, wanted = self.dist.tensors[slot.key].shape, slot.global_shape
        if shape == wanted:
            return None
        rows = len(slot.index)
        if parameter.pad_vocabulary and len(shape) == len(wanted) and shape[rows] > wanted[rows]:
            shape = (*shape[:rows], wanted[rows], *shape[rows + 1 :])
        return None if shape == wanted else f"{slot.key} has shape {shape}, not {wanted}"


# Of an optimizer, alone or one of several.
_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")


def stored_head(dist: DistReader) -> Head | None:
    """The score head that a checkpoint holds; None: it is a causal language model."""
    name = megatron_name(WEIGHT)
    weight = dist.tensors.get(name)
    return None if weight is None else found_head(weight.shape, megatron_name(BIAS) in dist.tensors, dist.folder, name)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"

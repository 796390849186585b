"""How a rank of an engine moves its weights into memory that the trainer's ranks can map (`megarl.reshard.exposure`)."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from megarl.cpu.memory import SHARED, give_back_heap
from megarl.errors import RunError
from megarl.reshard.bucket import ALIGN
from megarl.reshard.exposure import Exposure, Spot
from megarl.rollout.shards import Shard, shards_of

_KEPT = 256 << 20  # bytes of memory that was moved from, until it is given back


class Memory:
    """All parameters of a model in one file without a name, which ends with the last process that has it open or mapped."""

    def __init__(self, model: torch.nn.Module):
        """Move them, one after the other: parameters stay the objects that they are and change only where their numbers lie."""
        parameters = [parameter for parameter in model.parameters() if parameter.numel()]
        places = [-(-_span(parameter.data) // ALIGN) * ALIGN for parameter in parameters]
        self.size = max(1, sum(places))
        self._handle = os.memfd_create(SHARED)
        os.ftruncate(self._handle, self.size)  # pages come as they are written
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        self.held: dict[str, Shard] = {}  # what was exposed, by the checkpoint's name
        self._memory = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)
        self._at: list[tuple[torch.nn.Parameter, int]] = []
        at, kept = 0, 0
        for parameter, place in zip(parameters, places, strict=True):
            data = parameter.data
            flat = self._memory[at : at + _span(data)].view(data.dtype)
            parameter.data = flat.as_strided(data.shape, data.stride(), flat.storage_offset()).copy_(data)
            del data
            self._at.append((parameter, parameter.data_ptr()))
            at, kept = at + place, kept + place
            if kept > _KEPT or at == self.size:
                give_back_heap()
                kept = 0

    def check(self) -> None:
        """RunError where a parameter lies elsewhere by now: what is written here would not be what the model computes with."""
        if any(parameter.data_ptr() != address for parameter, address in self._at):
            raise RunError("the engine's model has moved its weights; set reshard.in_place=false")

    def expose(self, model: torch.nn.Module, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> Exposure:
        """Where the parts of a checkpoint's `tensors` (name, shape) lie. RunError naming one that has another shape."""
        own, spots = shards_of(model), {}
        self.held = {name: own[name].real(name, shape) for name, shape in tensors}
        for name, shard in self.held.items():
            view = shard.view
            if not view.numel():  # there are more ranks than heads
                continue
            offset = view.data_ptr() - self._memory.data_ptr()
            assert 0 <= offset <= self.size, f"{name} does not lie in the exposed memory"
            kind = str(view.dtype).removeprefix("torch.")
            spots[name] = Spot(kind, tuple(view.shape), view.stride(), offset, tuple(shard.origin))
        return Exposure(self.path, self.size, spots)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last, whatever its strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()

"""Moves what a role holds on its device to CPU memory and back, between the phases of a step.

What is moved are storages, not tensors: Megatron keeps parameters and gradients as views of a few large buffers
(`_ParamAndGradBuffer`), master weights may be views of those again, and the optimizer's shards of them too. A storage is copied
once, shrunk to zero bytes, later grown and filled again; every view of it, and every reference to the view, stays what it is.

    parameters   the model's parameters and buffers, and the distributed optimizer's parameter buffers
    gradients    the gradient buffers; they are not copied, because a training step starts by zeroing them
    optimizer    master weights and the states of the optimizer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megarl.megatron.parallel import device

KINDS = ("parameters", "gradients", "optimizer")


class Moved(NamedTuple):
    """What one call moved: bytes of the device's memory by kind, and how long it took."""

    bytes: dict[str, int]
    seconds: float

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        if not self.total:
            return "nothing moved: all of it is in CPU memory, where it stays"
        parts = ", ".join(f"{kind} {count / 2**20:.1f} MiB" for kind, count in self.bytes.items())
        return f"{parts} in {self.seconds:.2f} s"


@dataclass
class _Away:
    """A storage that has been emptied."""

    storage: torch.UntypedStorage
    size: int
    kept: torch.Tensor | None  # (size,) bytes in CPU memory; None: nothing to keep, filled with zeros on return


@dataclass
class Memory:
    """What a role holds, and where it is.

    On a machine without CUDA there is nowhere to move it to: both calls do nothing and say so, unless `even_on_cpu`, which
    moves it all the same, from CPU memory to CPU memory.
    """

    chunks: Sequence[torch.nn.Module]  # plain, or wrapped in Megatron's DistributedDataParallel
    optimizer: Any = None  # ours, or None
    even_on_cpu: bool = False
    before_change: Callable[[], None] = lambda: None  # called before any of it is freed here, or updated by its owner
    _away: dict[str, list[_Away]] = field(default_factory=dict)
    _kept: dict[int, torch.Tensor] = field(default_factory=dict)  # pinning is slow: CPU copies are made once a storage

    @property
    def away(self) -> tuple[str, ...]:
        """The kinds that are not on the device: whoever touches them now reads freed memory."""
        return tuple(kind for kind in KINDS if kind in self._away)

    def need(self, *kinds: str) -> None:
        """RuntimeError where one of these kinds (none named: any) is away."""
        if missing := [kind for kind in self.away if kind in (kinds or KINDS)]:
            raise RuntimeError(
                f"{' and '.join(missing)} of this model are offloaded; restore them before they are used"
            )

    def offload(self, *kinds: str) -> Moved:
        """Free the device's memory of these kinds; none named: all. What is away already is left alone."""
        start = time.perf_counter()
        self.before_change()
        moved = {}
        for kind in _checked(kinds):
            if kind in self._away:
                continue
            found = list(self._storages(kind))
            if kind == "gradients" and self.optimizer is not None:
                self.optimizer.inner.zero_grad()  # lets go of copies in another dtype than the buffers'
            # Copies first, all in flight at once; only then is anything freed.
            away = [_Away(s, s.nbytes(), None if kind == "gradients" else self._copy(s)) for s in found]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            for part in away:
                part.storage.resize_(0)
            if away:
                self._away[kind] = away
            moved[kind] = sum(part.size for part in away)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # to the device: other processes need it now
        return Moved(moved, time.perf_counter() - start)

    def restore(self, *kinds: str) -> Moved:
        """Bring these kinds back, bit by bit as they were (gradients: zero); none named: all. What is there is left alone."""
        start = time.perf_counter()
        moved = {}
        for kind in _checked(kinds):
            away = self._away.pop(kind, [])
            for part in away:
                part.storage.resize_(part.size)
                if part.kept is None:
                    _bytes(part.storage).zero_()
                else:
                    _bytes(part.storage).copy_(part.kept, non_blocking=True)
            moved[kind] = sum(part.size for part in away)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Moved(moved, time.perf_counter() - start)

    def held(self) -> dict[str, int]:
        """Bytes on the device, by kind, as they are now."""
        return {kind: sum(storage.nbytes() for storage in self._storages(kind)) for kind in KINDS}

    def _storages(self, kind: str) -> Iterator[torch.UntypedStorage]:
        """Storages of a kind on the device, each once. What master weights only look into belongs to the parameters, and what
        their gradients look into to the gradients."""
        seen: set[int] = set()
        for earlier in KINDS[: KINDS.index(kind)]:
            seen |= {tensor.untyped_storage()._cdata for tensor in self._tensors(earlier)}
        for tensor in self._tensors(kind):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in seen and self._movable(tensor):
                seen.add(storage._cdata)
                yield storage

    def _movable(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == device().type and (tensor.device.type != "cpu" or self.even_on_cpu)

    def _tensors(self, kind: str) -> Iterator[torch.Tensor]:
        if kind == "parameters":
            for chunk in self.chunks:
                yield from _plain(p.data for p in chunk.parameters())
                # not `chunk.buffers()`: Megatron's DistributedDataParallel has a list by that name
                yield from _plain(b for m in chunk.modules() for b in m._buffers.values() if b is not None)
            yield from (b.param_data for b in self._buffers() if b.param_data is not None)
        elif kind == "gradients":
            yield from (b.grad_data for b in self._buffers())
        elif self.optimizer is not None:
            yield from _plain(_states(self.optimizer.inner))

    def _buffers(self) -> Iterator[Any]:
        """Megatron's buffers of parameters and gradients, of the dense part and of the experts."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                yield from chunk.buffers + chunk.expert_parallel_buffers

    def _copy(self, storage: torch.UntypedStorage) -> torch.Tensor:
        source = _bytes(storage)
        kept = self._kept.get(storage._cdata)
        if kept is None or kept.numel() != source.numel():
            kept = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._kept[storage._cdata] = kept
        return kept.copy_(source, non_blocking=True)


def _checked(kinds: tuple[str, ...]) -> tuple[str, ...]:
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is nothing that can be offloaded; it must be one of {', '.join(KINDS)}")
    return kinds or KINDS


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that hold memory: of a wrapper (a float8 tensor with its scales) the ones inside."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _plain(getattr(tensor, name) for name in names)
        elif type(tensor) in (torch.Tensor, torch.nn.Parameter):
            yield tensor
        else:
            raise TypeError(f"cannot offload a {type(tensor).__name__}: it does not say which tensors it is made of")


def _states(inner: Any) -> Iterator[torch.Tensor]:
    """Master weights and states of every optimizer in Megatron's chain."""
    for part in getattr(inner, "chained_optimizers", [inner]):
        adam = part.optimizer
        if adam is None:
            continue
        for group in adam.param_groups:
            yield from (p.data for p in group["params"] if p is not None)
        for state in adam.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

"""Buckets in the memory of the GPU that a rank and an engine share: the engine loads from where the rank has written.

Each rank has a bucket of its own. It writes its slices to their places among zeros, then the ranks' buckets are added up, byte by
byte (`gather`): since every byte comes from one rank, each has the whole tensors now, which is what SGLang's loader takes.

A rank makes the memory of a bucket once for a run. Its handle lies in a file beside the path by which all know the bucket, with the
device in its name: an engine's rank looks there for its own device's, opens it once, and keeps it as long as the file is there. Were
handles made anew for every update, the memory of those before would wait for torch's count of who has opened it, which does not go
down when an engine is killed.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from megarl.errors import RunError

_DEVICE = 6  # where the device's number stands among the arguments of `rebuild_cuda_tensor`


class Kind(Protocol):
    """A kind of device."""

    def device(self) -> str:
        """The one that this process computes on, by a name that it has in every process of the machine."""

    def make(self, size: int) -> tuple[torch.Tensor, bytes]:
        """So many bytes there, and the handle by which another process opens them, as long as they are held here."""

    def open(self, handle: bytes) -> torch.Tensor:
        """The bytes that another process has made on the same device."""


class Cuda:
    """CUDA IPC, as torch.multiprocessing has it. Processes number GPUs by what they see of them, so the name is the UUID."""

    def device(self) -> str:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def make(self, size: int) -> tuple[torch.Tensor, bytes]:
        memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        _, arguments = reductions.reduce_tensor(memory)
        return memory, pickle.dumps(arguments)

    def open(self, handle: bytes) -> torch.Tensor:
        arguments = list(pickle.loads(handle))
        arguments[_DEVICE] = torch.cuda.current_device()  # here it may have another number
        return reductions.rebuild_cuda_tensor(*arguments)


KINDS: dict[str, Kind] = {"cuda": Cuda()}

# Of this process, by the bucket's path:
_made: dict[str, torch.Tensor] = {}
_opened: dict[str, tuple[int, torch.Tensor]] = {}  # with the inode of the handle's file


def offer(kind: str, paths: Sequence[str], size: int) -> str:
    """Hold memory of `size` bytes for each of these buckets, and for no other. Why it cannot be, in one line; empty where it can."""
    if list(_made) == list(paths):
        return ""
    _made.clear()
    try:
        for path in paths:
            memory, handle = KINDS[kind].make(size)
            file = _file(kind, path)
            unfinished = file.with_name(f"{file.name}-{os.getpid()}")
            unfinished.write_bytes(handle)
            os.replace(unfinished, file)
            _made[path] = memory
    except Exception as error:  # noqa: BLE001  there is another way, whatever the reason
        _made.clear()
        return _line(error)
    return ""


def reach(kind: str, paths: Sequence[str]) -> str:
    """Open these buckets. Why it cannot be, in one line; empty where it can."""
    try:
        for path in paths:
            memory(kind, path)
    except Exception as error:  # noqa: BLE001
        return _line(error)
    return ""


def memory(kind: str, path: str) -> torch.Tensor:
    """All bytes (uint8) of a bucket that this process has made, or another on the same device. RunError where there is none."""
    if path in _made:
        return _made[path]
    file = _file(kind, path)
    try:
        inode = file.stat().st_ino
    except OSError:
        raise RunError("no rank of the trainer is on the same GPU") from None
    if _opened.get(path, (0, None))[0] != inode:
        for old in [old for old in _opened if old == path or not _file(kind, old).exists()]:
            del _opened[old]
        _opened[path] = inode, KINDS[kind].open(file.read_bytes())
    return _opened[path][1]


def gather(data: torch.Tensor) -> None:
    """Of buckets in which each rank has written its slices among zeros: all of them in each. Every rank has to call it."""
    if dist.get_world_size() > 1:
        dist.all_reduce(data)
    settle(data)


def settle(data: torch.Tensor) -> None:
    """Return when all has happened that was begun with it."""
    if data.is_cuda:
        torch.cuda.synchronize(data.device)


def _file(kind: str, path: str) -> Path:
    return Path(f"{path}-{KINDS[kind].device()}")


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

"""Memory that an engine gives back while others compute, for SGLang on CPU; and the peak of what processes held.

SGLang releases the weights and the cache of an engine on GPUs (package torch_memory_saver); on a CPU its calls do nothing. `activate`
has them give whole pages of those tensors back to the kernel, which hands out zeros when they are next touched: addresses stay. Of the
model these are the parameters, each of which a weight sync fills; buffers (rotary tables) stay.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

_RELEASE = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation"
)
SHARED = (
    "megarl-weights"  # the name of memory in which an engine lets others write its weights (`megarl.rollout.exposing`)
)
_DONTNEED, _REMOVE = 4, 9  # MADV_ of madvise(2), on Linux: of a process's own pages, and of those that it shares
_CACHES = ("k_buffer", "v_buffer", "kv_buffer")


def activate() -> None:
    """Let SGLang's `release_memory_occupation` release memory of a CPU. For each of its processes, while it loads plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_RELEASE, _released, HookType.AROUND)


def _released(original: Any, manager: Any, request: Any) -> Any:
    """SGLang's own call checks that the engine is idle, and forgets what the cache held."""
    answer = original(manager, request)
    runner = manager.tp_worker.model_runner
    tags = request.tags or ("kv_cache", "weights")
    tensors: list[torch.Tensor] = []
    if "kv_cache" in tags:
        pool = runner.token_to_kv_pool
        tensors += [tensor for name in _CACHES for tensor in getattr(pool, name, ())]
    if "weights" in tags:
        tensors += [parameter.data for parameter in runner.model.parameters()]
    give_back(tensors)
    return answer


def give_back(tensors: Iterable[torch.Tensor]) -> int:
    """Return the pages that hold nothing but these tensors to the kernel; they read as zeros then. Bytes that were returned.

    What shares a page with something else stays as it is, and so does a tensor that is not contiguous or lies in a file; memory that
    an engine shares (`SHARED`) is given back for all who have mapped it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    ranges = list(_ranges())
    starts = [start for start, _, _ in ranges]
    total = 0
    for tensor in tensors:
        if not tensor.is_contiguous():
            continue
        page = mmap.PAGESIZE
        first = -(-tensor.data_ptr() // page) * page
        last = (tensor.data_ptr() + tensor.nbytes) // page * page
        at = bisect.bisect_right(starts, first) - 1
        if first >= last or at < 0 or last > ranges[at][1]:
            continue
        if libc.madvise(first, last - first, ranges[at][2]):
            number = ctypes.get_errno()
            raise OSError(number, f"memory cannot be given back: {os.strerror(number)}")
        total += last - first
    return total


def give_back_heap() -> None:
    """Memory that was freed, and that the allocator keeps to use again (`megarl.cpu.process_env`), goes back to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _ranges() -> Iterator[tuple[int, int, int]]:
    """Ranges of this process's addresses behind which there is no file but `SHARED` memory, and what gives their pages back.
    Neighbours are one."""
    begun = ended = kind = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        if name and name[0].startswith(f"/memfd:{SHARED}"):
            advice = _REMOVE
        elif inode == "0" and (not name or name[0] == "[heap]"):
            advice = _DONTNEED
        else:
            continue
        if start != ended or advice != kind:
            if ended:
                yield begun, ended, kind
            begun, kind = start, advice
        ended = end
    if ended:
        yield begun, ended, kind


def peak(processes: Iterable[int]) -> int:
    """Bytes of memory that processes have held at most since this was last asked, the sum of each one's peak; shared pages count in
    each. One that is gone counts nothing."""
    total = 0
    for pid in processes:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/status").read_text().split("VmHWM:")
            total += int(fields[1].split()[0]) << 10 if len(fields) > 1 else 0
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): resets the peak
    return total

"""The one place that knows a machine may have no CUDA.

Entered at the start of a process, before Megatron or SGLang is imported there: `enter_megatron()` in a trainer's rank,
`enter_sglang()` in an engine's process. Both do nothing where CUDA is available, so a GPU user never meets what is in here.
"""

from __future__ import annotations

import os


def has_cuda() -> bool:
    """Whether this process can use a CUDA device. Imports torch."""
    import torch

    return torch.cuda.is_available()


def enter_megatron() -> bool:
    """Make `megatron.core` importable and runnable without CUDA, in this process. Returns whether anything was done.

    Must come before the first import of `megatron.core`: RuntimeError otherwise.
    """
    if has_cuda():
        return False
    from megarl.cpu import megatron_hook

    megatron_hook.install()
    return True


def enter_sglang() -> bool:
    """Make SGLang's CPU engine importable and runnable in this process. Returns whether anything was done.

    Must come before the first import of `sglang`: RuntimeError otherwise. Processes that SGLang spawns have to enter
    themselves: see `megarl.rollout.host`.
    """
    if has_cuda():
        return False
    from megarl.cpu import sglang_standins

    sglang_standins.install()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # SGLang takes the CPU for its device only when told so
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # no C++ builds by inductor, which take minutes and need a toolchain
    return True


def process_env(threads: int) -> dict[str, str]:
    """Environment for a process that computes on `threads` cores; it must be set before that process starts.

    The MALLOC_ variables (glibc) keep large freed blocks in the process. By default every big tensor is mapped, zeroed by the
    kernel page by page and unmapped again, which doubled the time of a log-prob pass on CPU.
    """
    count = str(max(1, threads))
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        # Threads that wait sleep, after some microseconds. Ranks and engine share the cores: a thread that spins for one that has no
        # core takes the core from it, which made a training step three times as long. To sleep at once is as bad on a quiet
        # machine, where the next operation comes before a thread is awake again: a decode step took a quarter longer.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "1000",
        "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "THP_MEM_ALLOC_ENABLE": "1",  # torch's own switch: huge pages for large tensors
    }

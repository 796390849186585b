"""Small operations of SGLang on one thread.

Threads that wait sleep (`megarl.cpu.process_env`), and waking one takes longer than a norm of 64 tokens does: torch shares out every
operation on more than 32,768 numbers, and a norm is a dozen of them. Numbers do not change by it: what is shared out is rows.

Loaded with `megarl.cpu.attention`. It does nothing where CUDA is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

SMALL = 1 << 19  # numbers; about where two threads take as long as one


def activate() -> None:
    """Norms, activations, rotary embeddings and the cache's new rows of few tokens: on one thread."""
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.kernels.fused_op.BaseFusedOp.forward", _layer, HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.memory_pool._set_kv_buffer_impl", _store, HookType.AROUND)


@contextmanager
def one_thread(numbers: int) -> Iterator[None]:
    """The caller's operations run on one thread, if they are on at most `SMALL` numbers."""
    threads = torch.get_num_threads()
    if numbers > SMALL or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _layer(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with one_thread(max((x.numel() for x in args if isinstance(x, torch.Tensor)), default=0)):
        return original(*args, **options)


def _store(original: Callable[..., None], k: torch.Tensor, *args: Any, **options: Any) -> None:
    with one_thread(k.numel()):
        original(k, *args, **options)

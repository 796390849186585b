"""Import Megatron-core on a machine without CUDA.

Megatron-core asks for `torch.cuda` by name all over its source. `install()` puts an import hook in front of `megatron.core`
that rewrites those names while a module of it is compiled; nothing in torch or in any other package is touched:

    "cuda", "cuda:0", f"cuda:{i}"   ->  "cpu"                          devices as strings
    "torch.cuda.FloatTensor"        ->  "torch.FloatTensor"            what Tensor.type() is compared with
    torch.cuda.NAME                 ->  the stand-in's NAME            streams, events, generators, synchronisation
    x.cuda(...)                     ->  x.cpu()
    f(..., pin_memory=...)          ->  f(...)                         pinned memory needs a device to be pinned for

Afterwards the mends in `megatron_mends` are applied to the modules that still take CUDA for granted.
Works with megatron-core 0.16 to 0.19. Does nothing where CUDA is available.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

import torch

from megarl.cpu.megatron_mends import MENDS

PACKAGE = "megatron.core"
_STAND_IN = "__megarl_cuda__"  # the name that rewritten modules know the stand-in by
_ELEMENTS = ("Float", "Half", "BFloat16", "Double", "Int", "Long")
_TENSOR_TYPES = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in _ELEMENTS}

_KERNEL_MODULES = {"megatron.core.transformer.moe.ops.paged_stash"}  # imported always, unguarded, since 0.18 or 0.19


class InOrder:
    """A stream and an event at once: on a CPU every operation is finished when the next one starts."""

    def _done(self, *args: Any, **kwargs: Any) -> InOrder:
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _done

    def query(self) -> bool:
        return True


class Cuda:
    """What `torch.cuda` means inside `megatron.core` on a machine without it."""

    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    _stream = InOrder()

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    set_device = synchronize = empty_cache = reset_peak_memory_stats = _nothing

    def _no_bytes(self, device: Any = None) -> int:
        return 0

    memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = _no_bytes

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @property
    def random(self) -> Cuda:
        return self

    def _in_order(self, *args: Any, **kwargs: Any) -> InOrder:
        return self._stream

    Stream = Event = current_stream = default_stream = _in_order

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        # names in annotations, exception types, nvtx: the real ones, never called on this path
        return getattr(torch.cuda, name)


class _Retarget(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if node.value in ("cuda", "cuda:0"):
                node.value = "cpu"
            else:
                node.value = _TENSOR_TYPES.get(node.value, node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and first.value == "cuda:" and len(node.values) == 2:
            return ast.copy_location(ast.Constant("cpu"), node)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_STAND_IN, ast.Load()), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr, node.args, node.keywords = "cpu", [], []
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "pin_memory"]
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)  # straight from the source: a cached .pyc holds the code as it was written
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = _Retarget().visit(ast.parse(data, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_STAND_IN] = Cuda()
        super().exec_module(module)
        if mend := MENDS.get(module.__name__):
            mend(module)


class _KernelLoader(importlib.abc.Loader):
    """Stands for a module that holds nothing but Triton kernels: every name is there, and launching it is refused."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = lambda name: _kernel(f"{module.__name__}.{name}", name)


def _kernel(full_name: str, name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{full_name} is a GPU kernel, and this machine has no CUDA")

    return refuse


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _ours(fullname):
            return None
        if fullname in _KERNEL_MODULES and importlib.util.find_spec("triton") is None:
            return importlib.machinery.ModuleSpec(fullname, _KernelLoader())
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def _ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(PACKAGE + ".")


def installed() -> bool:
    """Whether the hook is in place in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Put the hook in place, once; nothing happens where CUDA is available.

    Raises RuntimeError when `megatron.core` was imported before: its modules would be half one thing, half the other.
    """
    if torch.cuda.is_available() or installed():
        return
    if any(_ours(name) for name in sys.modules):
        raise RuntimeError("the CPU hook must be installed before the first import of megatron.core")
    sys.meta_path.insert(0, _Finder())

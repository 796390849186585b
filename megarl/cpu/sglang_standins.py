"""What SGLang imports but never calls on a CPU: stand-ins for packages that exist for GPUs only, or that nothing here needs.

SGLang imports Triton and its own kernel package wherever a GPU path is defined, and torchvision, IPython and some more
in passing.
`install()` puts an import hook in place that answers for those names in this process; nothing lies on disk under them, so no
other process can pick them up by accident. A stand-in has every attribute: error types, types, decorators and submodules
as its name suggests. Launching a kernel raises RuntimeError.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

ALWAYS = ("triton", "sgl_kernel")  # a CUDA build that is installed fails at import without a driver
IF_MISSING = ("torchvision", "IPython", "tvm_ffi", "compressed_tensors", "partial_json_parser", "sentencepiece")


class Kernel:
    """What a compiled kernel is here: something with a name that refuses to run."""

    def __init__(self, function: Any = None, **options: Any):
        self.__name__ = getattr(function, "__name__", str(function))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{self.__name__} is a GPU kernel, and this machine has no CUDA")

    def __getitem__(self, grid: Any) -> Kernel:
        return self


class _TypeStandIn(type):
    def __getattr__(cls, name: str) -> str:  # members of enumerations: any distinct value does
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StandIn(ModuleType):
    """A module in which every name can be found."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._make(name)
        setattr(self, name, value)
        return value

    def _make(self, name: str) -> Any:
        if name.endswith(("Error", "Exception", "OutOfResources")):
            return type(name, (Exception,), {"__module__": self.__name__})
        if name[0].isupper():
            return _TypeStandIn(name, (), {"__module__": self.__name__, "__init__": lambda self, *args, **kwargs: None})
        return importlib.import_module(f"{self.__name__}.{name}")  # a submodule, or a function: callable as a decorator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # @decorator
        return lambda function: function  # @decorator(...)


class _Config:
    """One configuration of an autotuned kernel."""

    def __init__(self, kwargs: dict[str, Any] | None = None, **options: Any):
        self.kwargs = kwargs or {}


def _fill_triton(module: Any) -> None:
    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return Kernel if function is None else Kernel(function)

    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length() if n > 0 else 1

    module.__version__ = "0.0.0"
    module.jit, module.cdiv, module.next_power_of_2 = jit, lambda a, b: -(-a // b), next_power_of_2
    module.autotune = module.heuristics = lambda *args, **kwargs: lambda function: function
    module.Config = _Config


def _fill_triton_backends(module: Any) -> None:
    module.backends = {}  # no backend: torch.utils._triton.has_triton() is False, as it must be


def _fill_triton_language(module: Any) -> None:
    module.constexpr = type("constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)})


def _fill_sgl_kernel(module: Any) -> None:
    def assign_req_to_token_pool_cpu(
        requests: torch.Tensor,
        table: torch.Tensor,
        start: torch.Tensor,
        end: torch.Tensor,
        slots: torch.Tensor,
        width: int,
    ) -> None:
        """table[request, start:end] = that request's part of the cache slots: the one kernel that SGLang's CPU path needs."""
        at = 0
        for row, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
            table[row, first:last] = slots[at : at + last - first]
            at += last - first

    def refuse(name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"sgl_kernel.{name}")

    module.__dict__["__getattr__"] = refuse
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu


_FILL: dict[str, Callable[[Any], None]] = {
    "triton": _fill_triton,
    "triton.backends": _fill_triton_backends,
    "triton.language": _fill_triton_language,
    "sgl_kernel": _fill_sgl_kernel,
}


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name == "sgl_kernel":
            return ModuleType(spec.name)  # SGLang asks it what it has: functions, not decorators
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.setdefault("__version__", "0.0.0")
        if fill := _FILL.get(module.__name__):
            fill(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, roots: Sequence[str]):
        self.roots = frozenset(roots)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)


def installed() -> bool:
    """Whether the stand-ins answer in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Let the stand-ins answer in this process, once; nothing happens where CUDA is available.

    Raises RuntimeError when `sglang` was imported before.
    """
    if torch.cuda.is_available() or installed():
        return
    if "sglang" in sys.modules:
        raise RuntimeError("the stand-ins must be installed before the first import of sglang")
    missing = [name for name in IF_MISSING if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _Finder([*ALWAYS, *missing]))

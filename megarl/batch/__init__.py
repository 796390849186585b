"""What travels between the rooms: `Sample` (one trajectory), `Batch` (many, flat arrays), plans that cut a batch.

Names resolve on first use, so that a module which only wants `Prompt` does not pay for importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.batch.batch import Batch, Field, Level
    from megarl.batch.plan import balance, micro_batches
    from megarl.batch.sample import Prompt, Sample

__all__ = ["Batch", "Field", "Level", "Prompt", "Sample", "balance", "micro_batches"]

_HOME = {
    "Batch": "batch",
    "Field": "batch",
    "Level": "batch",
    "Prompt": "sample",
    "Sample": "sample",
    "balance": "plan",
    "micro_batches": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

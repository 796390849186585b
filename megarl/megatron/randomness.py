"""The random states of a rank: torch's on the CPU and on its GPU, and those that Megatron tracks for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def states() -> dict[str, torch.Tensor]:
    """Bytes by name."""
    found = {f"tracked.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found | {"cpu": torch.get_rng_state()}


def restore(saved: Mapping[str, torch.Tensor]) -> None:
    """Of `states`; one that was not saved stays as it is."""
    present = states() | dict(saved)
    torch.set_rng_state(present["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(present["cuda"])
    tracked = {name.removeprefix("tracked."): state for name, state in present.items() if name.startswith("tracked.")}
    get_cuda_rng_tracker().set_states(tracked)

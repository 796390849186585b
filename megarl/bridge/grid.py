"""Where a rank stands in the grid of a layout, by its number: Megatron's order, in which tensor-parallel ranks are neighbours.

Of the ranks of a pipeline stage, which are one run of numbers, layers that are not experts see tensor x context x data and experts
expert_tensor x expert x expert_data, each the first one fastest (`parallel_state.initialize_model_parallel`, order tp-cp-ep-dp-pp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Seat:
    """A rank's coordinates; a `Standing` of `layout.py`."""

    rank: int
    world: int
    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    data: int
    data_size: int
    context: int
    context_size: int
    expert: int
    expert_size: int
    expert_tensor: int
    expert_tensor_size: int
    expert_data: int
    virtual_size: int = 1

    @property
    def expert_data_size(self) -> int:
        """How many ranks of a stage hold the same part of the same experts."""
        return self.world // (self.pipeline_size * self.expert_size * self.expert_tensor_size)

    @property
    def replica(self) -> int:
        """Which of the ranks that share a gradient of what is no expert (data x context parallel)."""
        return self.data * self.context_size + self.context


def seat(rank: int, parallel: Any) -> Seat:
    """Of a rank of the configuration's section `parallel`."""
    tensor, context, pipeline = parallel.tensor, parallel.context, parallel.pipeline
    expert_tensor = tensor if parallel.expert_tensor is None else parallel.expert_tensor
    stage, within = divmod(rank, parallel.ranks // pipeline)
    of_experts = within // expert_tensor
    return Seat(
        rank=rank,
        world=parallel.ranks,
        tensor=within % tensor,
        tensor_size=tensor,
        pipeline=stage,
        pipeline_size=pipeline,
        data=within // (tensor * context),
        data_size=parallel.data,
        context=within // tensor % context,
        context_size=context,
        expert=of_experts % parallel.expert,
        expert_size=parallel.expert,
        expert_tensor=within % expert_tensor,
        expert_tensor_size=expert_tensor,
        expert_data=of_experts // parallel.expert,
        virtual_size=parallel.virtual,
    )

"""Megatron's schedules over a list of micro-batches: one call for every layout, with as many micro-batches as each asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.parallel import Place, device


def most(own: int, place: Place) -> int:
    """The largest `own` of the ranks that must run as often as each other; collective among them.

    Where ranks of other data hold a part of the experts, each forward pass needs them all. Else every rank goes its own way.
    """
    if place.expert_size * place.expert_tensor_size <= place.tensor_size:
        return own
    largest = torch.tensor(own, device=device())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return int(largest)


def micro_batch_count(own: int, place: Place) -> int:
    """How many micro-batches this rank has to run when `own` of them have samples: as many as `most`, and, since the interleaved
    schedule deals them out in rounds of as many as there are stages, a multiple of that there."""
    count = most(own, place)
    return count + -count % place.pipeline_size if place.virtual_size > 1 else count


class Schedule:
    """Runs forward and backward passes of this rank's chunks of the model through Megatron's schedule for the layout."""

    def __init__(self, config: TransformerConfig, place: Place):
        self.config = config
        self.place = place

    def __call__(
        self,
        chunks: Sequence[torch.nn.Module],
        micro_batches: Sequence[Any],
        lengths: Sequence[int],
        forward: Callable,
        *,
        forward_only: bool,
    ) -> list[Any]:
        """`forward(iterator over micro_batches, chunk)` as Megatron's forward_step_func. Answers what the loss functions
        reported, by micro-batch (nothing where the last stage is not on this rank).

        `lengths`: rows of the hidden states of each micro-batch on this rank.
        """
        interleaved: dict[str, Any] = {}
        if self.place.virtual_size > 1:
            interleaved["p2p_communicator"] = _TwoLanes(self.config, self.place, lengths)
            interleaved["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups(
                ["tp", "pp", "cp", "embd", "pos_embd", "dp_cp"]
            )
        several = len(chunks) > 1
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in chunks] if several else iter(micro_batches),
            model=list(chunks) if several else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=max(lengths),  # only asked for: stages tell each other the lengths, or know them
            micro_batch_size=1,
            forward_only=forward_only,
            **interleaved,
        )


class _TwoLanes(P2PCommunicator):
    """Activations and gradients of one run of the interleaved pipeline, on a process group each.

    The interleaved pipeline is a ring. With two stages both neighbours of a rank are the same process, and messages of one
    group arrive in the order they were sent: an activation would be taken for a gradient. Nor may stages ask each other for
    lengths, since each would wait for the other's answer. They know them: each lane follows the table of the schedule.
    """

    def __init__(self, config: TransformerConfig, place: Place, lengths: Sequence[int]):
        super().__init__(mpu.get_pipeline_model_parallel_group(), config)
        table = get_schedule_table(len(lengths), place.virtual_size, config.microbatch_group_size_per_vp_stage)
        first, last, top = place.pipeline == 0, place.last_stage, place.virtual_size - 1
        # The stage before runs its chunks forward in the order of the table; the last chunk's outputs go nowhere from the last
        # stage. Backward, chunks are taken from the other end, and the first chunk's gradients end at the first stage.
        self._activations = iter([lengths[m] for m, chunk in table if not (first and chunk == top)])
        self._gradients = iter([lengths[m] for m, chunk in table if not (last and chunk == top)])

    def _communicate(
        self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True
    ):
        activation = self._empty(next(self._activations)) if recv_prev else None
        gradient = self._empty(next(self._gradients)) if recv_next else None
        forth = (tensor_send_next, self.next_rank, activation, self.prev_rank, self.pp_group)
        back = (tensor_send_prev, self.prev_rank, gradient, self.next_rank, mpu.get_model_parallel_group())
        lanes = [_operations(*lane) for lane in (forth, back)]
        for request in [request for lane in lanes if lane for request in dist.batch_isend_irecv(lane)]:
            request.wait()
        return activation, gradient, None

    def _empty(self, length: int) -> torch.Tensor:
        shape = (length, 1, self.config.hidden_size)
        return torch.empty(shape, dtype=self.config.pipeline_dtype, device=device(), requires_grad=True)


def _operations(
    sent: torch.Tensor | None, to: int, received: torch.Tensor | None, source: int, group: dist.ProcessGroup
) -> list[dist.P2POp]:
    operations = [] if sent is None else [dist.P2POp(dist.isend, sent.contiguous(), to, group)]
    return operations + ([] if received is None else [dist.P2POp(dist.irecv, received, source, group)])

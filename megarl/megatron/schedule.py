"""Megatron's schedules over a list of micro-batches: one call for every layout, with as many micro-batches as each asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.parallel import Place, device


def micro_batch_count(own: int, place: Place) -> int:
    """How many micro-batches this rank has to run when `own` of them have samples; collective where ranks must agree.

    Where the ranks of other data hold a part of the experts, each forward pass needs them all: the largest count of any rank.
    The interleaved schedule deals micro-batches out in rounds of as many as there are stages.
    """
    count = own
    if place.expert_size * place.expert_tensor_size > place.tensor_size:
        largest = torch.tensor(own, device=device())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mpu.get_data_parallel_group(with_context_parallel=True))
        count = int(largest)
    return count + -count % place.pipeline_size if place.virtual_size > 1 else count


class Schedule:
    """Runs forward and backward passes of this rank's chunks of the model through Megatron's schedule for the layout."""

    def __init__(self, config: TransformerConfig, place: Place, longest: int):
        """`longest`: tokens of a micro-batch, which Megatron asks for; stages tell each other the real lengths."""
        self._fixed: dict[str, Any] = {"seq_length": longest, "micro_batch_size": 1}
        if place.virtual_size > 1:
            self._fixed["p2p_communicator"] = _TwoLanes(mpu.get_pipeline_model_parallel_group(), config)
            self._fixed["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups(
                ["tp", "pp", "cp", "embd", "pos_embd", "dp_cp"]
            )

    def __call__(
        self, chunks: Sequence[torch.nn.Module], micro_batches: Sequence[Any], forward: Callable, *, forward_only: bool
    ) -> list[Any]:
        """`forward(iterator over micro_batches, chunk)` as Megatron's forward_step_func. Answers what the loss functions
        reported, by micro-batch (nothing where the last stage is not on this rank)."""
        several = len(chunks) > 1
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in chunks] if several else iter(micro_batches),
            model=list(chunks) if several else chunks[0],
            num_microbatches=len(micro_batches),
            forward_only=forward_only,
            **self._fixed,
        )


class _TwoLanes(P2PCommunicator):
    """Activations and gradients on process groups of their own.

    The interleaved pipeline is a ring. With two stages both neighbours of a rank are the same process, and messages of one
    group arrive in the order they were sent: an activation would be taken for a gradient.
    """

    def _communicate(
        self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True
    ):
        forth = (tensor_send_next, self.next_rank, recv_prev, self.prev_rank, self.pp_group)
        back = (tensor_send_prev, self.prev_rank, recv_next, self.next_rank, mpu.get_model_parallel_group())
        sizes = [
            (
                None if sent is None else torch.tensor(sent.shape, device=device()),
                to,
                _empty(3, torch.int64, recv),
                *rest,
            )
            for sent, to, recv, *rest in (forth, back)
        ]
        _exchange(sizes)
        tensors = [
            (sent, to, None if shape is None else _empty(shape.tolist(), self.config.pipeline_dtype), *rest)
            for (sent, to, _, *rest), (_, _, shape, *_) in zip((forth, back), sizes, strict=True)
        ]
        _exchange(tensors)
        return (*(None if t is None else t.requires_grad_() for _, _, t, *_ in tensors), None)


def _empty(shape: int | list[int], dtype: torch.dtype, wanted: bool = True) -> torch.Tensor | None:
    return torch.empty(shape, dtype=dtype, device=device()) if wanted else None


def _exchange(lanes: Sequence[tuple]) -> None:
    """(sent or None, to, place of what is received or None, from, group) each; returns when all is there."""
    requests = []
    for sent, to, received, source, group in lanes:
        operations = [] if sent is None else [dist.P2POp(dist.isend, sent.contiguous(), to, group)]
        operations += [] if received is None else [dist.P2POp(dist.irecv, received, source, group)]
        requests += dist.batch_isend_irecv(operations) if operations else []
    for request in requests:
        request.wait()

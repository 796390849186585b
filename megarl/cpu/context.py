"""Keys and values of all ranks of context parallelism, for the local core attention.

Each rank sends its rows to every other: on gloo twice as fast as all_gather and four times as fast as reduce_scatter
(8 MB among two ranks: 6 ms against 12 and 23), and the same calls serve NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def gather_rows(x: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(T, …) rows of this rank -> (ranks · T, …) those of all in the order of the whole row.

    rows: (ranks, T), for every rank of `group` the places of its rows. In the backward pass each rank gets back the gradients
    of its rows, summed over the ranks that used them, in float32.
    """
    return _Gather.apply(x, rows.to(x.device), group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, group):
        ctx.save_for_backward(rows)
        ctx.group = group
        whole = x.new_empty(rows.numel(), *x.shape[1:])
        for places, part in zip(rows, swap([x] * len(rows), group), strict=True):
            whole[places] = part
        return whole

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        # Added up in the order of the ranks, so that the sum does not depend on who is asked.
        shares = swap([grad[places] for places in rows], ctx.group)
        return (
            torch.stack(shares).sum(dim=0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype),
            None,
            None,
        )


def swap(outgoing: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Element r goes to rank r of the group; answers what every rank sent here. All of one shape and dtype."""
    own = dist.get_rank(group)
    incoming = [part if r == own else torch.empty_like(part) for r, part in enumerate(outgoing)]
    operations = []
    for distance in range(1, len(outgoing)):
        to, source = (own + distance) % len(outgoing), (own - distance) % len(outgoing)
        operations.append(dist.P2POp(dist.isend, outgoing[to].contiguous(), group=group, group_peer=to))
        operations.append(dist.P2POp(dist.irecv, incoming[source], group=group, group_peer=source))
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    return incoming

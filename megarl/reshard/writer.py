"""The trainer's side of a transfer: each rank writes the slices it owns straight to their places in a shared bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from megarl.bridge.layout import Copy
from megarl.bridge.model_map import Parameter
from megarl.megatron.parallel import Place
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.fingerprint import combine, partial


class _Slice(NamedTuple):
    tensor: torch.Tensor
    copy: Copy
    float32: bool  # whatever the model's dtype is


class ShardWriter:
    """Knows which regions of the checkpoint's tensors this rank answers for: over all ranks, every element once.

    Tensors that several ranks hold alike are shared out: replicated ones go to the first tensor-parallel rank, and the ranks
    with the same part (data and context parallelism; of experts, what is left of a stage) take turns tensor by tensor.
    """

    def __init__(self, parameters: Iterable[tuple[Parameter, torch.Tensor]], place: Place):
        self._slices: dict[str, list[_Slice]] = defaultdict(list)
        turns: dict[bool, int] = {False: 0, True: 0}  # experts are counted by themselves: other ranks share them
        for parameter, tensor in parameters:
            of_experts = parameter.expert is not None
            turns[of_experts] += 1
            replica = parameter.replica(place)
            if not parameter.exported or replica is None or turns[of_experts] % replica[1] != replica[0]:
                continue
            for copy in parameter.copies(place):
                self._slices[copy.hf_name].append(_Slice(tensor.data, copy, parameter.float32))

    @torch.no_grad()
    def write(self, bucket: BucketSpec) -> None:
        """Write this rank's part of a bucket, in the bucket's dtype."""
        for name, whole in bucket.views().items():
            for piece in self._slices.get(name, ()):
                whole[piece.copy.hf].copy_(piece.tensor[piece.copy.local])

    @torch.no_grad()
    def fingerprints(self, names: Iterable[str], dtype: str) -> dict[str, int]:
        """This rank's share of the fingerprints of the named tensors, modulo 2**64: taken in `dtype`, or in float32 where a
        tensor stays that."""
        shares: dict[str, int] = {}
        for name in names:
            pieces = self._slices.get(name, ())
            if pieces:
                kind = torch.float32 if pieces[0].float32 else getattr(torch, dtype)
                shares[name] = combine(
                    [partial(p.tensor[p.copy.local].to(kind), [s.start for s in p.copy.hf]) for p in pieces]
                )
        return shares

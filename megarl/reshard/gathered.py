"""Weights out of shards that share no memory with who reads them: for an export, on several machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

import torch

from megarl.bridge.layout import Copy
from megarl.reshard.bucket import BucketSpec


class Holders(Protocol):
    """All ranks that hold a model."""

    def pieces(self, bucket: BucketSpec) -> list[list[tuple[Copy, torch.Tensor]]]:
        """Each rank's slices of a bucket's tensors, with where they belong."""


def gathered(buckets: Sequence[BucketSpec], shards: Holders) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under the checkpoint's name, in its order; of a bucket at a time."""
    for bucket in buckets:
        whole = {item.name: torch.empty(item.shape, dtype=getattr(torch, item.dtype)) for item in bucket.tensors}
        for copy, piece in chain(*shards.pieces(bucket)):
            copy.of(whole[copy.hf_name][copy.hf]).copy_(piece)
        yield from whole.items()

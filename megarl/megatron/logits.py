"""The logits of a whole model in one process, to be compared with those of another implementation."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megarl.batch.packing import Packed, Segment
from megarl.bridge.hf_io import load_parameter
from megarl.bridge.model_map import ModelMap
from megarl.megatron import model as stage
from megarl.megatron import parallel


@torch.no_grad()
def logits(model_map: ModelMap, reader: Any, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """(T, V) float32 for each of `rows` (T,) token ids, computed in float32 by a language model whose weights `reader` has under the
    names of Hugging Face."""
    with _alone() as place:
        config = stage.transformer_config(model_map, place, dtype="float32", sequence=False)
        (chunk,) = stage.build(model_map, place, config)
        for parameter, tensor in stage.parameters_of([chunk], model_map):
            load_parameter(reader, parameter, place, tensor.data)
        weight = stage.unwrap(chunk).output_weight()[: model_map.dims.vocab].float()
        return [_hidden(chunk, row).float() @ weight.t() for row in rows]


def _hidden(chunk: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """(T, H) last hidden states of one sequence."""
    length, nothing = len(tokens), torch.zeros(0, dtype=torch.int64)
    row = Packed(
        tokens, torch.arange(length), [Segment(0, length)], nothing, nothing, torch.ones(length, dtype=torch.bool)
    )
    params = stage.packed_params(row, torch.float32)
    on = parallel.device()
    return chunk(tokens.to(on)[None], row.positions.to(on)[None], None, packed_seq_params=params)[:, 0]


@contextmanager
def _alone() -> Iterator[parallel.Place]:
    """A grid of one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        yield parallel.start(0, 1, "127.0.0.1", port, tensor=1, pipeline=1, seed=0)
    finally:
        parallel.stop()

"""What a whole model answers in one process, to be compared with another implementation."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarl.batch import Batch, Sample
from megarl.megatron import parallel
from megarl.megatron.engine import EngineSettings, MegatronEngine


def distributions(folder: Path, reader: Any, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """(T - 1, V) float32 log-probs of the whole vocabulary after each token but the last of `rows` (T,), computed in float32.

    `folder` has the model's config.json, `reader` its weights under the names of Hugging Face.
    """
    batch = Batch.from_samples([_sample(number, row.tolist()) for number, row in enumerate(rows)])
    with _alone() as place:
        engine = MegatronEngine(folder, place, EngineSettings("float32"), reader=reader)
        found = engine.log_probs(batch, temperature=1.0, top_k=engine.map.dims.vocab)
    assert found is not None  # this is the last stage
    whole = torch.empty(found["top_log_probs"].shape).scatter_(1, found["top_ids"], found["top_log_probs"].float())
    return list(whole.split([len(row) - 1 for row in rows]))


def _sample(number: int, tokens: list[int]) -> Sample:
    """All tokens but the first are the response."""
    return Sample(
        uid=str(number),
        group=str(number),
        prompt_ids=tokens[:1],
        response_ids=tokens[1:],
        loss_mask=[1] * (len(tokens) - 1),
        rollout_log_probs=[0.0] * (len(tokens) - 1),
        stop_reason="stop",
        weight_version=0,
    )


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

"""The engine of a model with a score head: the values of a critic, the scores of a reward model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms import Denominators
from megarl.batch import Batch, Level
from megarl.batch.packing import Packed
from megarl.bridge.heads import Head
from megarl.bridge.hf_config import read_config
from megarl.megatron import model as stage
from megarl.megatron.engine import EngineSettings, MegatronEngine, on_rectangle, report_of
from megarl.megatron.parallel import Place


class ValueEngine(MegatronEngine):
    """A `MegatronEngine` whose head answers with K scores a response token, float32, from the hidden state that predicts the
    token: V(s_t), where s_t is all that comes before token t."""

    def __init__(
        self,
        folder: Path,
        place: Place,
        settings: EngineSettings,
        head: Head,
        *,
        optimizer: Any = None,
        total_updates: int = 1,
    ):
        super().__init__(folder, place, settings, optimizer=optimizer, total_updates=total_updates, head=head)
        self.head = head
        self.pad = read_config(folder).get("pad_token_id")

    @torch.no_grad()
    def values(self, batch: Batch) -> Batch | None:
        """RESPONSE field `values`, (R,), of several labels (R, K), in the order of `batch`; None where the last stage is not."""
        return self._look(batch, self._values_only, ("values",))

    @torch.no_grad()
    def scores(self, batch: Batch) -> Batch | None:
        """SAMPLE field `scores` (N, K): the labels' scores after the last token of prompt and response that is no padding token,
        as transformers' sequence classifiers define it. None where the last stage is not."""
        closed = closing(batch, self.pad)
        done = self.values(closed)
        if done is None:
            return None
        last = closed.response_lengths.cumsum(0) - 1
        scores = done["values"].index_select(0, last).view(len(batch), self.head.labels)
        return batch.select([]).set("scores", scores, Level.SAMPLE)

    def _values(self, row: Packed, hidden: torch.Tensor) -> torch.Tensor:
        values = stage.unwrap(self.chunks[-1]).score_head(self._states(row, hidden, shared_out=False))
        values = self._whole(row, values.t()).t()
        return values[:, 0] if self.head.labels == 1 else values

    def _values_only(self, micro: Batch, row: Packed, hidden: torch.Tensor):
        return torch.zeros((), device=hidden.device), {"values": self._values(row, hidden)}

    def _loss(
        self,
        objective: Callable,
        denominators: Denominators,
        temperature: float,
        micro: Batch,
        row: Packed,
        hidden: torch.Tensor,
    ):
        values = self._values(row, hidden)
        if not len(micro):
            return values.sum(), {}  # an empty micro-batch: nothing, but a backward pass like any other
        fields = [name for name in micro.names if micro.level(name) is Level.RESPONSE]
        data = {name: micro.padded(name).to(hidden.device) for name in fields}
        result = objective(on_rectangle(values, micro.response_mask.to(hidden.device)), data, denominators)
        return result.loss, report_of(result)


def closing(batch: Batch, pad: int | None) -> Batch:
    """Sequences whose last response token is predicted by the token that a sequence classifier looks at: the last one that is not
    `pad`, the first where all are (None: the last one). What comes after is dropped; the token put there is never looked at.

    The responses of the samples stay their responses, so that samples go on sharing prompts; an empty response gets one token.
    """
    tokens, prompts, ends = [], [], []
    rows = torch.as_tensor(batch["tokens"]).split(batch.total_lengths.tolist())
    for row, prompt in zip(rows, batch.prompt_lengths.tolist(), strict=True):
        at = torch.arange(len(row)) if pad is None else (row != pad).nonzero()[:, 0]
        end = int(at[-1]) + 1 if len(at) else 1
        tokens += [row[:end], row.new_zeros(1)]
        prompts.append(min(prompt, end))
        ends.append(end + 1)
    lengths = torch.tensor(prompts, dtype=torch.int64)
    result = Batch(lengths, torch.tensor(ends, dtype=torch.int64) - lengths)
    return result.set("tokens", torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64), Level.SEQUENCE)

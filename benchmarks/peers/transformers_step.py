"""A training step of transformers with torch's AdamW, as people write it: padded, a sequence at a time, or packed by positions.

Runs in a process of its own beside the engine that it is measured against (benchmarks/train_step.py), which gives it its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

PADDED_SEQUENCES = 4  # of a micro-batch: 8, TRL's and transformers' own number, take 12 GiB in float32
PACKED_TOKENS = 1024  # of a packed row: on CPU the blocks outside the mask are computed too


class Peer:
    """`samples`: (prompt ids, response ids); old_log_probs, advantages: (R,) of all response tokens, sample after sample."""

    def __init__(self, folder: Path, dtype: str, samples: list[tuple[list[int], list[int]]], lr: float, clip: float):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model.train()
        # The optimizer that transformers' Trainer takes by default.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0, fused=True)
        self.samples, self.clip = samples, clip

    def step(self, way: str, old_log_probs: torch.Tensor, advantages: torch.Tensor) -> tuple[float, float]:
        """One step; loss and norm of the gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        lengths = [len(response) for _, response in self.samples]
        old, weight = old_log_probs.split(lengths), advantages.split(lengths)
        loss = 0.0
        for indices, log_probs in getattr(self, f"_{way}")():
            ratio = (log_probs - torch.cat([old[i] for i in indices])).exp()
            a = torch.cat([weight[i] for i in indices])
            part = -torch.minimum(a * ratio, a * ratio.clamp(0.8, 1.2)).sum() / len(advantages)
            part.backward()
            loss += float(part.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip))
        self.optimizer.step()
        return loss, norm

    def _alone(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """A sequence at a time."""
        for i, (prompt, response) in enumerate(self.samples):
            ids = torch.tensor([prompt + response])
            logits = self.model(ids, logits_to_keep=len(response) + 1, use_cache=False).logits[0, :-1]
            yield [i], _log_probs(logits, response)

    def _packed(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Rows of several sequences, which transformers tells apart by their positions."""
        for indices in self._groups(lambda group: sum(map(self._length, group)) <= PACKED_TOKENS):
            samples = [self.samples[i] for i in indices]
            ids = torch.tensor([[t for prompt, response in samples for t in prompt + response]])
            positions = torch.cat([torch.arange(self._length(i)) for i in indices])[None]
            predicts, end = [], 0
            for prompt, response in samples:
                end += len(prompt) + len(response)
                predicts.append(torch.arange(end - len(response) - 1, end - 1))
            keep = torch.cat(predicts)
            logits = self.model(ids, position_ids=positions, logits_to_keep=keep, use_cache=False).logits[0]
            yield indices, _log_probs(logits, [t for _, response in samples for t in response])

    def _padded(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Micro-batches in the order of the batch, each filled up to its own longest sequence."""
        for indices in self._groups(lambda group: len(group) <= PADDED_SEQUENCES):
            longest = max(map(self._length, indices))
            ids = torch.zeros(len(indices), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(indices):
                ids[row, : self._length(i)] = torch.tensor([*self.samples[i][0], *self.samples[i][1]])
                mask[row, : self._length(i)] = 1
            first = min(len(self.samples[i][0]) for i in indices) - 1  # no logits before the first response
            out = self.model(ids, attention_mask=mask, logits_to_keep=longest - first, use_cache=False).logits
            rows = []
            targets = ids[:, first + 1 :]
            log_probs = _log_probs(out[:, :-1].flatten(0, 1), targets.flatten()).view(targets.shape)
            for row, i in enumerate(indices):
                prompt, response = self.samples[i]
                rows.append(log_probs[row, len(prompt) - 1 - first :][: len(response)])
            yield indices, torch.cat(rows)

    def _length(self, i: int) -> int:
        return sum(map(len, self.samples[i]))

    def _groups(self, fits) -> Iterator[list[int]]:
        group: list[int] = []
        for i in range(len(self.samples)):
            if group and not fits([*group, i]):
                yield group
                group = []
            group.append(i)
        yield group


def _log_probs(logits: torch.Tensor, targets) -> torch.Tensor:
    return -F.cross_entropy(logits.float(), torch.as_tensor(targets), reduction="none")

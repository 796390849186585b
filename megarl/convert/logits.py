"""Whether two models on disk answer alike, each by the implementation that its folder is for, in float32."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from megarl.convert.source import Source
from megarl.errors import UserError

LENGTHS = (2, 8, 65)  # tokens of the sequences that are looked at
MOST = 1e-4  # that log-probs may differ by, relative to the largest: float32 rounds otherwise in another order


def compare_logits(first: Source, second: Source) -> tuple[float, list[str]]:
    """How far the log-probs of the whole vocabulary are apart at most, relative to the largest; a sentence where that is too far.

    A Hugging Face folder is asked through transformers, a checkpoint of Megatron through a Megatron model in this process. Raises
    UserError for models that are no language models.
    """
    for source in (first, second):
        if source.head is not None:
            raise UserError(f"{source.folder} has a score head: --logits is for language models.")
        if source.quantised:
            raise UserError(
                f"{source.folder} has quantised weights, with which transformers does not compute in float32: convert it to Megatron "
                "and back, and give --logits what that makes."
            )
    vocabulary = min(first.model.dims.vocab, second.model.dims.vocab)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (length,), generator=generator) for length in LENGTHS]
    apart = []
    for a, b in zip(_log_probs(first, rows), _log_probs(second, rows), strict=True):
        if a.shape != b.shape:
            return float("inf"), [f"the vocabularies have {a.shape[1]} and {b.shape[1]} tokens"]
        apart.append((a - b).abs().max() / a.abs().max())
    worst = float(torch.stack(apart).max())  # NaN where there is one
    return worst, [f"logits are {worst:.1e} of the largest apart"] if not worst <= MOST else []


def _log_probs(source: Source, rows: list[Tensor]) -> list[Tensor]:
    """(T - 1, V) of each row."""
    if source.kind == "megatron":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's, of what this machine lacks
            from megarl.megatron.logits import distributions

            return distributions(source.texts, source.reader, rows)
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [torch.log_softmax(model(row[None]).logits[0, :-1], dim=-1) for row in rows]

"""What the local layers compute and Transformer Engine's attention cannot: a model that needs it is refused where that runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch

from megarl.bridge.model_map import ModelMap


def uses_transformer_engine() -> bool:
    """Whether layers are Transformer Engine's on this machine."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def beyond_transformer_engine(model: ModelMap, context: int) -> Iterator[str]:
    """What of a model on so many ranks of context parallelism Transformer Engine cannot compute, a sentence each."""
    instead = "remove transformer_engine from the environment for the slower local layers"
    if model.window is not None and context > 1:
        yield (
            f"a model of type {model.family} with sliding windows cannot be cut by context parallelism under Transformer Engine; "
            f"set context=1, or {instead}"
        )
    if model.transformer_config().get("attention_softcap") is not None:
        yield (
            f"a model of type {model.family} caps its attention scores (attn_logit_softcapping), which Transformer Engine does not; "
            f"{instead}"
        )
    if model.transformer_config().get("softmax_type"):
        yield (
            f"a model of type {model.family} has attention sinks, which have not been tried with Transformer Engine; {instead}"
        )

"""Mistral 7B and models of the same architecture: Llama's layers, in early versions every one with a sliding window."""

from __future__ import annotations

from typing import Any

from megarl.bridge import dense
from megarl.bridge.family import Config, Family
from megarl.bridge.windows import window_settings


def _window(config: Config) -> dict[str, Any]:
    return window_settings(config, default=4096)


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    rules=(
        dense.EMBEDDING,
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.ATTENTION_OUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    reads=frozenset({"sliding_window"}),
    settings=_window,
    requires={"hidden_act": ("silu",), "attention_dropout": (0, None)},
    defaults={"num_key_value_heads": 8, "head_dim": None},
)

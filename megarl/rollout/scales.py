"""Scales of float8 that SGLang's own loader of a model would lose.

SGLang 0.5.23's Llama, and Mistral with it, takes X.weight_scale_inv for X.weight_scale, has no such parameter, and goes on. Here they
are given to the parameters' own loaders, which know what is joined and cut.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.bridge import fp8
from megarl.rollout.shards import FUSED

_LOSES = "LlamaForCausalLM"


def lost(model: torch.nn.Module) -> bool:
    """Whether the model's loader loses scales."""
    return any(kind.__name__ == _LOSES for kind in type(model).__mro__)


def load(model: torch.nn.Module, name: str, scales_RC: torch.Tensor) -> None:
    """Load the scales `name` of a checkpoint's matrix, as SGLang loads other parameters of that layer."""
    parent, _, leaf = name.removesuffix(fp8.SCALES).rpartition(".")
    for joined, parts in FUSED.items():
        if leaf in parts:
            which = leaf[0] if joined == "qkv_proj" else parts.index(leaf)  # as SGLang calls the parts
            into: Any = model.get_parameter(f"{parent}.{joined}{fp8.SCALES}")
            into.weight_loader(into, scales_RC, which)
            return
    into = model.get_parameter(name)
    into.weight_loader(into, scales_RC)

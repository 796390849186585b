"""Tiny random models of every family, for tests: a second to make, with a real tokenizer and nothing that hides a mistake.

No two dimensions are equal where the architecture lets them differ, so that a missing transpose cannot pass; norms are away
from 1 and biases from 0, so that a dropped one shows. Heads, key-value heads and MLP divide by two (TP=2), and so do the
layers (PP=2); the vocabulary is odd, so that its padding is exercised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1  # of the recipes: a cached model of another version is not used
VOCAB = 419
POSITIONS = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
# Qwen2's head size follows from its hidden size, so its q rows equal it.
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 96, "intermediate_size": 136}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 24}

RECIPES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "hidden_size": 72, "intermediate_size": 120, "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2-untied": {**_QWEN2, "tie_word_embeddings": False},
    "qwen3": {**_QWEN3, "hidden_size": 80, "intermediate_size": 112, "tie_word_embeddings": True},
}


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model; `overrides` replace or add fields."""
    if family not in RECIPES:
        raise UserError(f"There is no tiny model of family {family!r}; there are {', '.join(sorted(RECIPES))}.")
    return {**_COMMON, **RECIPES[family], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, **overrides}


def make_tiny(family: str, folder: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """A Hugging Face folder with a random model of `family`, float32, under 3 MB. Refuses to overwrite."""
    import torch

    from megarl.bridge.folders import new_folder
    from megarl.bridge.hf_io import HFWriter
    from megarl.bridge.model_map import ModelMap
    from megarl.models.tokenizer import CHATML, END, PAD, START, train_small, write_tokenizer

    if not 0 <= seed < 2**63:
        raise UserError(f"The seed {seed} must be at least 0 and below 2**63.")
    config = tiny_config(family, **overrides)
    shapes = ModelMap.from_hf(config).hf_shapes
    with new_folder(Path(folder)) as building:
        with HFWriter(building, shapes, torch.float32) as writer:
            for name, tensor in random_weights(shapes, seed):
                writer.write(name, tensor)
        # The tokenizer keeps its size: a model may have more rows than its tokenizer has tokens, as Qwen's do.
        write_tokenizer(
            building,
            train_small(VOCAB),
            eos=END,
            pad=PAD,
            bos=START,
            unk=None,
            template=CHATML,
            length=int(config["max_position_embeddings"]),
        )
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        for name, content in (("config.json", {**config, "dtype": "float32"}), ("generation_config.json", generation)):
            (building / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return Path(folder)


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Weights of these shapes under which activations and logits stay of order one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            yield name, noise / math.sqrt(shape[-1])
        else:
            yield name, 0.3 * noise if name.endswith("bias") else 1.0 + 0.2 * noise

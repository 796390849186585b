"""Tiny random models of every family, for tests: a second to make, with a real tokenizer and nothing that hides a mistake.

No two dimensions are equal where the architecture lets them differ, so that a missing transpose cannot pass; norms are away
from 1 and biases from 0, so that a dropped one shows. Heads, key-value heads and MLP divide by two (TP=2), and so do the
layers (PP=2) and the experts (EP=2); the vocabulary is odd, so that its padding is exercised.
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
_QWEN3_MOE = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 88,
    "intermediate_size": 104,
    "moe_intermediate_size": 40,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Latent attention: queries and keys of 10 + 8, values of 14. The first MLP is dense.
_LATENT = {
    "attention_bias": False,
    "hidden_size": 96,
    "intermediate_size": 116,
    "num_key_value_heads": 6,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}
# A latent for queries too, YaRN that scales angles and softmax, 2 of 3 groups of experts looked into.
_DEEPSEEK = {
    **_LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 38,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
    },
}
_DEEPSEEK_V2 = {
    **_LATENT,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
}
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "head_dim": 16,
    "hidden_size": 72,
    "intermediate_size": 56,
    "num_local_experts": 10,
    "num_experts_per_tok": 2,
}
# A window shorter than most test sequences.
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "head_dim": 20,
    "hidden_size": 76,
    "intermediate_size": 124,
    "sliding_window": 7,
}
# Half of each head is turned by position.
_GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": True,
    "head_dim": 20,
    "partial_rotary_factor": 0.5,
    "hidden_size": 92,
    "intermediate_size": 108,
    "moe_intermediate_size": 36,
    "n_routed_experts": 14,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
# Half of each head is turned by position, gate and up are one tensor.
_GLM4 = {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "attention_bias": True,
    "head_dim": 28,
    "partial_rotary_factor": 0.5,
    "hidden_size": 84,
    "intermediate_size": 132,
}
# Windows shorter than most test sequences, caps that most scores and logits feel. Layers 1 and 3 have a window.
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 22,
    "hidden_size": 78,
    "intermediate_size": 118,
    "query_pre_attn_scalar": 17,
    "sliding_window": 7,
    "attn_logit_softcapping": 2.5,
    "final_logit_softcapping": 4.0,
}
# All layers but the third have a window.
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 26,
    "hidden_size": 90,
    "intermediate_size": 126,
    "query_pre_attn_scalar": 21,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    "rope_theta": 100000.0,
    "rope_local_base_freq": 1000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}
# Layers 1 and 3 have a window; the clamp of the experts' activation bites. torch's grouped product, by which transformers computes
# experts, wants sizes that divide by 4.
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 18,
    "hidden_size": 68,
    "intermediate_size": 44,
    "num_local_experts": 10,
    "num_experts_per_tok": 3,
    "sliding_window": 6,
    "swiglu_limit": 0.9,
    "rope_theta": 15000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}

RECIPES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "hidden_size": 72, "intermediate_size": 120, "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2-untied": {**_QWEN2, "tie_word_embeddings": False},
    "qwen3": {**_QWEN3, "hidden_size": 80, "intermediate_size": 112, "tie_word_embeddings": True},
    "qwen3-moe": {**_QWEN3_MOE, "tie_word_embeddings": False},
    "deepseek": {**_DEEPSEEK, "tie_word_embeddings": False},
    "deepseek-v2": {**_DEEPSEEK_V2, "tie_word_embeddings": False},
    "mixtral": {**_MIXTRAL, "tie_word_embeddings": False},
    "mistral": {**_MISTRAL, "tie_word_embeddings": False},
    "glm4-moe": {**_GLM4_MOE, "tie_word_embeddings": False},
    "gpt-oss": {**_GPT_OSS, "tie_word_embeddings": False},
    "glm": {**_GLM4, "architectures": ["GlmForCausalLM"], "model_type": "glm", "tie_word_embeddings": False},
    "glm4": {**_GLM4, "tie_word_embeddings": False},
    "gemma2": {**_GEMMA2, "tie_word_embeddings": True},
    "gemma3": {**_GEMMA3, "tie_word_embeddings": True},
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
    model = ModelMap.from_hf(config)
    shapes = model.hf_shapes
    with new_folder(Path(folder)) as building:
        with HFWriter(building, shapes, torch.float32) as writer:
            for name, tensor in random_weights(shapes, seed, norms=1.0 - model.norm_offset):
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


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], seed: int, *, norms: float = 1.0
) -> Iterator[tuple[str, Tensor]]:
    """Weights of these shapes under which activations and logits stay of order one; those of norms around `norms`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            yield name, noise / math.sqrt(shape[-1])
        else:
            # A bias that chooses experts is added to scores of 0.3 to 0.7.
            spread = 0.1 if name.endswith("correction_bias") else 0.3
            yield name, spread * noise if name.endswith("bias") else norms + 0.2 * noise

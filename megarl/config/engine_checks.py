"""Arguments of SGLang's engine under `rollout.engine` that other settings decide, or that megarl depends on. Their names and types
are SGLang's to know: `megarl.rollout.arguments`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.config.schema import Config

# Arguments that follow from a setting of megarl's.
_SETTINGS = {
    "model_path": "model.path",
    "dtype": "rollout.dtype",
    "quantization": "rollout.quantization",
    "random_seed": "run.seed",
    "max_total_tokens": "rollout.max_total_tokens",
    "enable_memory_saver": "rollout.release_memory",
}
_OWN = ("skip_tokenizer_init", "custom_weight_loader", "weight_version")

# What an engine does so that rollout.deterministic holds: on a CPU, on a GPU.
_DETERMINISTIC = ("max_running_requests", "disable_radix_cache", "enable_deterministic_inference")

# What makes an engine's linear layers float8.
_QUANTISED = ("json_model_override_args",)

_CUT = "weights are given to engines that are cut by rollout.engine.tp_size alone; leave it out"
_HERE = "an engine is on one machine; set rollout.engines for more engines"
_POOL = "an engine's GPUs are those of its pool; set rollout.pool"
_ANSWERS = "it changes what an engine answers; leave it out"
# Arguments that can have one value only, and why.
_ONLY: dict[str, tuple[Any, str]] = {
    "pp_size": (1, "an engine cannot be given weights stage by stage; set rollout.engine.tp_size"),
    "dp_size": (1, "an engine holds its weights once; set rollout.engines for more engines"),
    "nnodes": (1, _HERE),
    "node_rank": (0, _HERE),
    "base_gpu_id": (0, _POOL),
    "gpu_id_step": (1, _POOL),
    "attn_dp_size": (1, _CUT),
    "attn_cp_size": (1, _CUT),
    "moe_dp_size": (1, _CUT),
    "dcp_size": (1, _CUT),
    "dwdp_size": (1, _CUT),
    "enable_dp_attention": (False, _CUT),
    "is_embedding": (False, _ANSWERS),
    "incremental_streaming_output": (False, _ANSWERS),
    "preferred_sampling_params": (None, _ANSWERS),
}


def problems(cfg: Config) -> Iterator[str]:
    """One sentence for each thing that is wrong. Of engines that others have started (`rollout.urls`) nothing is to be said here."""
    engine = {} if cfg.rollout.urls else cfg.rollout.engine
    ranks = engine.get("tp_size", 1)
    if type(ranks) is not int or ranks < 1:
        yield f"rollout.engine.tp_size is {ranks!r}; it must be a whole number of at least 1, the ranks of an engine"
    for name, value in engine.items():
        said = f"rollout.engine.{name}={value}"
        if name in _SETTINGS:
            yield f"{said}: that follows from {_SETTINGS[name]}; set this, and leave rollout.engine.{name} out"
        elif name in _OWN:
            yield f"{said}: megarl sets that itself and depends on it; leave it out"
        elif name in _DETERMINISTIC and cfg.rollout.deterministic:
            yield f"{said}: rollout.deterministic sets that itself and depends on it; leave it out"
        elif name in _QUANTISED and cfg.rollout.quantization:
            yield f"{said}: rollout.quantization sets that itself and depends on it; leave it out"
        elif name in _ONLY and (value != _ONLY[name][0] or type(value) is not type(_ONLY[name][0])):
            yield f"{said}: {_ONLY[name][1]}"
    yield from _quantisation(cfg)
    share = engine.get("mem_fraction_static")
    if share is not None and not (type(share) is float and 0 < share < 1):
        yield f"rollout.engine.mem_fraction_static is {share!r}; it must be a number above 0 and below 1, a share of a GPU's memory"
    new = max(cfg.rollout.max_new_tokens, cfg.evaluation.max_new_tokens or 0)
    need, room = cfg.data.max_prompt_tokens + new, engine.get("context_length")
    if type(room) is int and room < need:
        yield (
            f"rollout.engine.context_length={room} cannot hold a prompt and its response, which data.max_prompt_tokens and "
            f"max_new_tokens allow {need} tokens together; set it to at least {need}, or leave it out"
        )


def _quantisation(cfg: Config) -> Iterator[str]:
    if cfg.rollout.quantization is None or cfg.rollout.urls:
        return
    said, dtype = f"rollout.quantization={cfg.rollout.quantization}", cfg.rollout.dtype or cfg.model.dtype
    if dtype != "bfloat16":
        yield f"{said}: SGLang computes such a model in bfloat16, and this one's engines in {dtype}; set rollout.dtype=bfloat16"
    if cfg.reshard.probe and cfg.reshard.probe_tolerance is None:
        yield (
            f"{said}: how far log-probs of a probe then are from the trainer's depends on the model; set reshard.probe_tolerance, or "
            "reshard.probe=false"
        )


def told(cfg: Config) -> set[str]:
    """Arguments of `rollout.engine` that `problems` has looked at: nobody needs to ask SGLang what it thinks of them."""
    looked_at = {*_SETTINGS, *_OWN, *_ONLY, "tp_size", "mem_fraction_static"}
    return {
        name for name in cfg.rollout.engine if name in looked_at | set(_QUANTISED if cfg.rollout.quantization else ())
    }

"""What kind of value each field of config.json must have, whatever family reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.errors import UserError

Config = Mapping[str, Any]  # a config.json


@dataclass(frozen=True)
class Kind:
    """Of a value; `nullable`: null says the same as to leave the field out."""

    what: str
    fits: Callable[[object], bool]
    nullable: bool = False


def _is_number(value: object, least: float) -> bool:
    """Finite, and not so large that no float holds it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < 1e300


def _is_whole(value: object, least: int, end: float = math.inf) -> bool:
    """From `least` to below `end`. Tensors of larger sizes have shapes that 64 bits do not count."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end


POSITIVE = Kind("a finite number above 0", lambda value: _is_number(value, 5e-324))
POSITIVE_OR_NULL = Kind(f"{POSITIVE.what}, or null", POSITIVE.fits, True)
NOT_NEGATIVE = Kind("a finite number of at least 0, or null", lambda value: _is_number(value, 0), True)
SIZE = Kind("a positive whole number below 2**31", lambda value: _is_whole(value, 1, 1 << 31))
SIZE_OR_NULL = Kind(f"{SIZE.what}, or null", SIZE.fits, True)
COUNT = Kind("a whole number from 0 to below 2**31, or null", lambda value: _is_whole(value, 0, 1 << 31), True)
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
TRUTH_OR_NULL = Kind("true, false or null", TRUTH.fits, True)
NAME = Kind("a name, or null", lambda value: isinstance(value, str) and value != "", True)
OBJECT = Kind("an object, or null", lambda value: isinstance(value, Mapping), True)

KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(
        ("rms_norm_eps", "query_pre_attn_scalar", "rope_local_base_freq", "partial_rotary_factor"), POSITIVE
    ),
    **dict.fromkeys(("rope_theta", "routed_scaling_factor", "swiglu_limit"), POSITIVE_OR_NULL),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), POSITIVE_OR_NULL),
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"), SIZE),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "moe_intermediate_size", "num_experts_per_tok"), SIZE),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), SIZE),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"), SIZE),
    **dict.fromkeys(("decoder_sparse_step", "sliding_window_pattern", "_sliding_window_pattern"), SIZE),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "q_lora_rank", "sliding_window"), SIZE_OR_NULL),
    **dict.fromkeys(("n_group", "topk_group"), SIZE_OR_NULL),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers", "num_mtp_layers"), COUNT),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob", "use_qk_norm"), TRUTH),
    "attention_bias": TRUTH_OR_NULL,
    **dict.fromkeys(("rope_scaling", "rope_parameters"), OBJECT),
}
# In rope_scaling and rope_parameters, and in what the latter holds for each kind of layer.
ROPE_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("rope_theta", "factor", "partial_rotary_factor", "attention_factor"), POSITIVE_OR_NULL),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), POSITIVE_OR_NULL),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NOT_NEGATIVE),
    "original_max_position_embeddings": SIZE_OR_NULL,
    "truncate": TRUTH_OR_NULL,
    **dict.fromkeys(("rope_type", "type"), NAME),
    **dict.fromkeys(("full_attention", "sliding_attention"), OBJECT),
}


def faults(config: Config, read: Collection[str]) -> Iterator[str]:
    """A sentence's part for each of the fields that are read whose value is not of its kind."""
    yield from _faults({key: value for key, value in config.items() if key in read}, KINDS, "")
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(fields := config.get(key), Mapping):
            yield from _faults(fields, ROPE_KINDS, f"{key}.")
            for layers, inner in fields.items():
                if isinstance(inner, Mapping):
                    yield from _faults(inner, ROPE_KINDS, f"{key}.{layers}.")


def _faults(fields: Config, kinds: Mapping[str, Kind], prefix: str) -> Iterator[str]:
    for key, value in fields.items():
        kind = kinds.get(key)
        if kind is not None and not (kind.fits(value) or (value is None and kind.nullable)):
            yield f"{cut(prefix + key)} = {short(value)} must be {kind.what}"


def among(value: object, allowed: Sequence[object]) -> bool:
    """Whether it is one of some values, of its kind, too: Python takes true for 1 and false for 0."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


def short(value: object, most: int = 40) -> str:
    """A value as a sentence may hold it."""
    return cut(repr(value), most)


def cut(text: str, most: int = 60) -> str:
    """A name as a sentence may hold it."""
    return text if len(text) <= most else text[: most - 3] + "..."


def some(problems: Sequence[str], most: int = 8) -> str:
    """A sentence's parts, of many the first."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "; ".join([*problems[:most], *more])


def either(config: Config, names: Sequence[str], default: Any = None) -> Any:
    """What is said under whichever of several names for one thing. UserError where two of them say different things."""
    said = {name: config[name] for name in names if config.get(name) is not None}
    values = list(said.values())
    if any(value != values[0] for value in values):
        told = " and ".join(f"{name} = {short(value)}" for name, value in said.items())
        raise UserError(f"config.json: {told} are names of one thing and disagree.")
    return values[0] if values else default


def whole(config: Config, field: str, least: int) -> int:
    """A field that is a whole number."""
    value: int | None = config.get(field)
    if value is None or not _is_whole(value, least):
        raise UserError(f"config.json: {field} = {short(value)} must be a whole number of at least {least}.")
    return value


def number(config: Config, field: str, default: float | None) -> float | None:
    """A field that is a number above 0, or null."""
    value: float | None = config.get(field, default)
    if value is not None and not POSITIVE.fits(value):
        raise UserError(f"config.json: {field} = {short(value)} must be {POSITIVE.what}.")
    return value

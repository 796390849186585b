"""config.json, read strictly: a field that nobody understood is an error, since ignoring it would train another model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.bridge.family import Dims, Family
from megarl.bridge.fields import among, cut, either, faults, short, some
from megarl.errors import UserError

SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
}

READ = frozenset(
    {
        *SIZES.values(),
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
    }
)

# Fields of every `transformers` config that say nothing about a causal language model's arithmetic.
NEUTRAL = frozenset(
    {
        *("architectures", "model_type", "_name_or_path", "transformers_version", "transformers.js_config", "auto_map"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class"),
        *("torch_dtype", "dtype", "initializer_range", "use_cache", "_attn_implementation_autoset"),
        *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
        *("id2label", "label2id", "problem_type"),
        *("unsloth_fixed", "unsloth_version"),
    }
)
# `transformers` writes these into every config; anything but the usual value would be another model.
USUAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False, None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "partial_rotary_factor": (1, None),
}
PER_LAYER = frozenset({"layer_types"})  # of what families require: a list, with a value for each layer
PARTIAL = "partial_rotary_factor"
# More than any model has: a map of so many would take hours to make. Experts: of all layers together.
_MOST = {"layers": 10_000, "heads": 4_096, "kv_heads": 4_096, "experts": 200_000}
_LARGEST = (1 << 31) - 1  # of anything else, as `fields.SIZE`


@dataclass(frozen=True)
class Rope:
    """Rotary positions as Megatron's GPTModel takes them."""

    base: float
    percent: float = 1.0  # the share of a head's numbers, from the first, that is turned
    scaling_factor: float | None = None  # Llama 3.1's scaling
    interpolation: float | None = None  # linear scaling: positions are divided by it
    yarn: Mapping[str, Any] | None = None  # YaRN, as the arguments of MLATransformerConfig
    truncate: bool = True  # YaRN's bounds are rounded to whole dimensions

    def latent_args(self) -> dict[str, Any]:
        """Arguments of Megatron's MLATransformerConfig: there the attention makes its own rotary angles."""
        if self.scaling_factor is not None or self.interpolation is not None:
            raise UserError("config.json: with latent attention, rope scaling must be none or yarn.")
        return {
            "rope_type": "rope" if self.yarn is None else "yarn",
            "rotary_base": self.base,
            "rotary_scaling_factor": 1.0,
            **(self.yarn or {}),
        }

    def yarn_attributes(self) -> dict[str, Any]:
        """What Megatron's GPTModel reads off its configuration where positions are the model's own; empty without YaRN."""
        if self.yarn is None:
            return {}
        named = {f"yarn_{key}": value for key, value in self.yarn.items()}
        if not named["yarn_mscale_all_dim"]:  # the angles are scaled by the factor alone
            named |= {"yarn_mscale": None, "yarn_mscale_all_dim": None}
        return named | {"yarn_correction_range_round_to_int": self.truncate}

    def model_args(self) -> dict[str, Any]:
        args: dict[str, Any] = {"rotary_base": int(self.base) if float(self.base).is_integer() else self.base}
        args["rotary_percent"] = self.percent
        if self.scaling_factor is not None:
            args |= {"rope_scaling": True, "rope_scaling_factor": self.scaling_factor}
        if self.yarn is not None:
            args["position_embedding_type"] = "yarn"
        if self.interpolation is not None:
            args["seq_len_interpolation_factor"] = self.interpolation
        return args


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no config.json, so it is not a Hugging Face model folder.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds {type(config).__name__}, not an object.")
    return config


def check_fields(family: Family, config: Mapping[str, Any]) -> None:
    """Refuses, all at once and by name, every field that is unknown or has a value the rules are not exact for."""
    problems = []
    requires = {key: usual for key, usual in USUAL.items() if key not in family.reads} | dict(family.requires)
    for key, value in config.items():
        if key in requires:
            allowed = requires[key]
            supported = ", ".join(map(repr, allowed))
            if key in PER_LAYER:
                if not (isinstance(value, list) and all(among(item, allowed) for item in value)):
                    problems.append(f"{key} = {short(value)} is not supported (supported: a list of {supported})")
                elif len(value) != (layers := config.get("num_hidden_layers")):
                    problems.append(f"{key} = {short(value)} must say it for each of {short(layers)} layers")
            elif not among(value, allowed):
                problems.append(f"{key} = {short(value)} is not supported (supported: {supported})")
        elif key == "quantization_config":
            problems.append(
                "the weights are quantised: give the unquantised checkpoint; from mxfp4 or fp8 `megarl convert hf-to-megatron` and "
                "`megatron-to-hf` make one"
            )
        elif key not in READ | NEUTRAL | family.ignores | family.understands:
            problems.append(f"the field {cut(key)} = {short(value)} is not understood")
    problems += faults(config, (READ | family.understands) - requires.keys())
    if problems:
        raise UserError(f"config.json of a {family.architecture}: {some(problems)}.")


def read_dims(family: Family, config: Mapping[str, Any]) -> Dims:
    """The sizes, with the family's own defaults for what config.json may leave out."""
    sizes: dict[str, int] = {}
    for name, key in SIZES.items():
        if name == "head_dim" and family.latent:
            continue  # the sum of two parts, which the family adds
        value = config.get(key, family.defaults.get(key))
        if value is None and key == "num_key_value_heads" and (key in config or key in family.defaults):
            value = sizes["heads"]
        if value is None and key == "head_dim":
            value, rest = divmod(sizes["hidden"], sizes["heads"])
            if rest:
                raise UserError(f"config.json: hidden_size {sizes['hidden']} is no multiple of {sizes['heads']} heads.")
        sizes[name] = _size(family, name, key, value)
    for name, keys in family.sizes.items():
        key = next((key for key in keys if key in config), keys[0])
        most = _MOST["experts"] // sizes["layers"] if name == "experts" else None
        sizes[name] = _size(family, name, key, either(config, keys, family.defaults.get(key)), most)
    if sizes["heads"] % sizes["kv_heads"]:
        raise UserError(
            f"config.json: num_attention_heads {sizes['heads']} is no multiple of num_key_value_heads {sizes['kv_heads']}."
        )
    derived = family.derive(config, sizes) if family.derive is not None else {}
    return Dims(**{**sizes, **derived})


def _size(family: Family, name: str, key: str, value: Any, most: int | None = None) -> int:
    if value is None:
        raise UserError(f"config.json of a {family.architecture} lacks {key}.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} = {short(value)} must be a positive whole number.")
    if value > (most := most or _MOST.get(name, _LARGEST)):
        raise UserError(
            f"config.json: {key} = {short(value)} is more than any model has: at most {most} can be mapped."
        )
    return value


def read_rope(family: Family, config: Mapping[str, Any]) -> Rope:
    """Rotary base and scaling, as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) write them.

    YaRN is taken with latent attention, whose softmax scale it changes too, and of families that have it; a partial_rotary_factor
    of families that read it.
    """
    fields = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    default_base = float(family.defaults.get("rope_theta", 10000.0))
    base = float(fields.pop("rope_theta", None) or config.get("rope_theta") or default_base)
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
    fields.pop("type", None)
    percent = _percent(family, config, fields.pop("partial_rotary_factor", None))
    if kind == "default" and not fields:
        return Rope(base, percent)
    if kind in ("linear", "llama3") and fields.get("factor", 1) is None:
        raise UserError(f"config.json: rope scaling of kind {kind!r} lacks factor.")
    if kind == "linear" and set(fields) == {"factor"}:
        return Rope(base, percent, interpolation=float(fields["factor"]))
    # Megatron has the other three numbers of Llama 3.1's scaling built in.
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and {key: fields.get(key) for key in llama3} == llama3 and set(fields) == {*llama3, "factor"}:
        return Rope(base, percent, scaling_factor=float(fields["factor"]))
    if kind == "yarn" and (family.latent or family.yarn):
        truncate = fields.pop("truncate", None) is not False if family.yarn else True
        return Rope(base, yarn=_yarn(fields), truncate=truncate)
    raise UserError(f"config.json: rope scaling of kind {short(kind)} with {short(fields, 200)} is not supported.")


def _percent(family: Family, config: Mapping[str, Any], written: Any) -> float:
    """The share of a head that is turned; `written`: as transformers 5 states it."""
    if PARTIAL not in family.reads:
        if written not in (None, 1, 1.0):
            raise UserError("config.json: a partial_rotary_factor other than 1 is not supported.")
        return 1.0
    share = float(config.get(PARTIAL, family.defaults.get(PARTIAL, 1.0)) if written is None else written)
    if not 0 < share <= 1:
        raise UserError(f"config.json: partial_rotary_factor = {share:g} must be above 0 and at most 1.")
    return share


def _yarn(fields: dict[str, Any]) -> dict[str, Any]:
    """YaRN (arXiv:2309.00071) as Megatron takes it. Raises UserError for what transformers reads otherwise."""
    known = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    neutral = {"attention_factor": (None,), "truncate": (True, None)}
    odd = {
        key: value for key, value in fields.items() if key not in known and value not in neutral.get(key, (object(),))
    }
    missing = [key for key in ("factor", "original_max_position_embeddings") if fields.get(key) is None]
    if odd or missing:
        what = f"lacks {' and '.join(missing)}" if missing else f"with {short(odd, 200)} is not supported"
        raise UserError(f"config.json: rope scaling of kind 'yarn' {what}.")
    fast, slow = float(fields.get("beta_fast") or 32), float(fields.get("beta_slow") or 1)
    if fast < slow:
        raise UserError(
            f"config.json: rope scaling of kind 'yarn': beta_fast = {fast:g} must not be below beta_slow = {slow:g}."
        )
    mscale, all_dim = fields.get("mscale") or 0.0, fields.get("mscale_all_dim") or 0.0
    if all_dim and not mscale:
        # transformers then scales the softmax by it but not the angles; Megatron would do both.
        raise UserError("config.json: rope scaling of kind 'yarn' with mscale_all_dim but no mscale is not supported.")
    return {
        "rotary_scaling_factor": float(fields["factor"]),
        "original_max_position_embeddings": int(fields["original_max_position_embeddings"]),
        "beta_fast": fast,
        "beta_slow": slow,
        # Without both, the angles are scaled by mscale(factor, 1) alone.
        "mscale": float(mscale) if all_dim else 1.0,
        "mscale_all_dim": float(all_dim),
    }

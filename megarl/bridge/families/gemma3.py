"""Gemma 3, text only (arXiv:2503.19786): norms on queries and keys, five layers of six with a sliding window and a rotary base of
their own. The models that see images are another architecture, and refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.bridge import dense, gemma
from megarl.bridge.family import Config, Family
from megarl.bridge.fields import either, number, short
from megarl.bridge.windows import FULL, SLIDING, sliding_layers, window_settings
from megarl.errors import UserError


def _rope(config: Config) -> dict[str, Any]:
    """Of the layers without a window, as other families write it."""
    full = _both(config)[0]
    base = full.pop("rope_theta", None) or config.get("rope_theta") or 1_000_000.0
    return {"rope_theta": base, "rope_scaling": full | dict(config.get("rope_scaling") or {})}


def _window_base(config: Config) -> float:
    """The rotary base of layers with a window, which scale no positions."""
    windowed = _both(config)[1]
    base = windowed.pop("rope_theta", None) or config.get("rope_local_base_freq", 10_000.0)
    if windowed not in ({}, {"rope_type": "default"}):
        raise UserError(
            f"config.json: rope scaling of layers with a sliding window ({short(windowed, 200)}) is not supported."
        )
    return float(base)


def _both(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """What transformers 5 writes of layers without and with a window; empty where it did not write the file."""
    written = config.get("rope_parameters") or {}
    if not isinstance(written, Mapping) or not set(written) <= {FULL, SLIDING}:
        raise UserError(
            f"config.json: rope_parameters = {short(written, 200)} must say it for {FULL} and for {SLIDING}."
        )
    return dict(written.get(FULL) or {}), dict(written.get(SLIDING) or {})


def _settings(config: Config) -> dict[str, Any]:
    every = either(config, ("sliding_window_pattern", "_sliding_window_pattern"), 6)
    windows = window_settings(config, 4096, sliding_layers(config, every))
    return {
        **gemma.scales(config),
        **windows,
        **({"window_rotary_base": _window_base(config)} if windows else {}),
        "final_softcap": number(config, "final_logit_softcapping", None),
    }


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    rules=(*gemma.RULES, dense.Q_NORM, dense.K_NORM),
    transformer={**gemma.TRANSFORMER, "qk_layernorm": True},
    reads=gemma.READS
    | {"final_logit_softcapping", "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
    settings=_settings,
    rope=_rope,
    requires={**gemma.REQUIRES, "attn_logit_softcapping": (None,)},
    ignores=gemma.IGNORES,
    defaults=gemma.DEFAULTS,
)

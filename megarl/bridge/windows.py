"""Sliding windows of attention, as config.json states them and as Megatron takes them.

A window of w: a token attends to itself and to the w - 1 before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.bridge.family import Config
from megarl.bridge.fields import short
from megarl.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"


def window_settings(config: Config, default: int | None, sliding: Sequence[bool] | None = None) -> dict[str, Any]:
    """Arguments of TransformerConfig for `sliding_window`; `sliding`: the layers that have one, None: all. Empty where none has.

    `default`: where config.json leaves the field out. Raises UserError for what is no window.
    """
    window = config.get("sliding_window", default)
    if (window is None and sliding is None) or not any(sliding or (True,)):
        return {}
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        layers = "" if sliding is None else " of the layers that have one"
        raise UserError(f"config.json: sliding_window = {short(window)}{layers} must be a positive whole number.")
    # Megatron counts the tokens before one and those after it.
    settings: dict[str, Any] = {"window_size": (window - 1, 0)}
    return settings if sliding is None else settings | {"window_attn_skip_freq": [int(layer) for layer in sliding]}


def sliding_layers(config: Config, every: int) -> list[bool]:
    """Which layers have a sliding window: as `layer_types` says, else all but each `every`th."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise UserError(
            f"config.json: layer_types = {short(kinds)} must say {SLIDING} or {FULL} for each of {layers} layers."
        )
    return [kind == SLIDING for kind in kinds]

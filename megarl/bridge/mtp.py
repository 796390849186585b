"""Layers for multi-token prediction (arXiv:2412.19437, sec. 2.2): each predicts one token further ahead.

They are carried over in conversions, and no part of the model that is trained. In checkpoints they stand behind the other layers and
count on from these; in Megatron they are `mtp.layers`, numbered from 0. Each is a layer like the last one, and what joins it to the
embedding of the next token. Whether a checkpoint has them its tensors tell: transformers leaves them out when it saves a model and
does not change config.json; GLM-4.6 has them without copies of the embedding and the output layer, which they share with the model.
Megatron has no parameters for these copies, so it reads over their keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megarl.bridge.dense import HF, MEGATRON
from megarl.bridge.family import MTP, Dims, Rule, with_part
from megarl.bridge.fields import either
from megarl.bridge.layout import Split
from megarl.errors import UserError

_MTP = "mtp.layers.{L}."
_MOST = 100  # more than any model has
# What the layers may have or not, by the end of its names, which is the same in Hugging Face's and in Megatron's.
_PARTS = {"mtp embedding": ".embed_tokens.weight", "mtp head": ".shared_head.head.weight"}

_OWN = (
    Rule({f"{HF}enorm.weight": "hidden"}, f"{_MTP}enorm.weight"),
    Rule({f"{HF}hnorm.weight": "hidden"}, f"{_MTP}hnorm.weight"),
    Rule({f"{HF}eh_proj.weight": "hidden hidden+hidden"}, f"{_MTP}eh_proj.weight", split=Split.ROWS),
    Rule({f"{HF}shared_head.norm.weight": "hidden"}, f"{_MTP}final_layernorm.weight"),
    Rule(
        {f"{HF}embed_tokens.weight": "vocab hidden"},
        f"{_MTP}embed_tokens.weight",
        split=Split.ROWS,
        pad_vocabulary=True,
        layers=with_part("mtp embedding"),
    ),
    Rule(
        {f"{HF}shared_head.head.weight": "vocab hidden"},
        f"{_MTP}shared_head.head.weight",
        split=Split.ROWS,
        pad_vocabulary=True,
        layers=with_part("mtp head"),
    ),
)


def count(config: Mapping[str, Any]) -> int:
    """How many such layers a config.json tells of."""
    for field in MTP:
        value = config.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST):
            raise UserError(f"config.json: {field} = {value!r} must be a whole number from 0 to {_MOST}.")
    return int(either(config, MTP, 0))


def is_ahead(name: str, layers: int) -> bool:
    """Whether a tensor, by either name, is of such a layer of a model with so many others."""
    _, behind, rest = name.partition("model.layers.")
    number = rest.partition(".")[0] if behind else ""
    return name.startswith("mtp.") or (number.isascii() and number.isdigit() and int(number[:9]) >= layers)


def held(names: Iterable[str], layers: int) -> frozenset[str] | None:
    """Which of the parts above the layers of a checkpoint have, by the names of its tensors; None: it has no such layers."""
    own = [name for name in names if is_ahead(name, layers)]
    if not own:
        return None
    return frozenset(part for part, end in _PARTS.items() if any(name.endswith(end) for name in own))


def rules(layer_rules: Iterable[Rule], dims: Dims) -> Iterator[Rule]:
    """Of all these layers, their numbers written out."""
    every = (*layer_rules, *_OWN)
    for number in range(dims.mtp):
        layer = dims.layers + number
        for rule in every:
            if rule.layers(dims, layer):
                yield replace(
                    rule,
                    hf={name.replace("{L}", str(layer)): shape for name, shape in rule.hf.items()},
                    megatron=_numbered(rule.megatron, number),
                    te=None if rule.te is None else _numbered(rule.te, number),
                    stage="mtp",
                )


def _numbered(name: str, number: int) -> str:
    inner = name.replace(MEGATRON, f"{_MTP}transformer_layer.")
    return inner.replace("{L}", str(number))

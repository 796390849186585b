"""What a model family says about itself: a table of rules and the config fields it understands."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.bridge.layout import Join, Shape, Split, stacked
from megarl.errors import UserError

Stage = Literal["first", "layer", "last"]


@dataclass(frozen=True)
class Dims:
    """The sizes that tensor shapes are made of."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def q(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    def shape(self, names: str) -> Shape:
        """`"q hidden"` → (heads x head_dim, hidden)."""
        return tuple(getattr(self, name) for name in names.split())


@dataclass(frozen=True)
class Rule:
    """Some Hugging Face tensors ↔ one Megatron parameter. `{L}` in a name stands for every layer, numbered globally.

    `hf` maps each name to its shape in the names of `Dims`; their order is the order in which `join` lays them down. `te` is
    the parameter's name in Megatron's Transformer Engine spec where that differs from the local spec's.
    """

    hf: Mapping[str, str]
    megatron: str
    split: Split = Split.NONE
    join: Join = stacked
    te: str | None = None
    stage: Stage = "layer"  # the pipeline stage that holds it
    pad_vocabulary: bool = False  # rows are the vocabulary: padded with zeros to a multiple of TP, cut on export
    tied_to: str | None = None  # with tied embeddings: the tensor that it is filled from, and is not written to


@dataclass(frozen=True)
class Family:
    """One architecture of `transformers`, as Megatron runs it.

    `requires` lists, for config fields that would change the arithmetic, the values under which the rules are exact;
    `ignores` the fields that say nothing about the arithmetic. A field in no list is refused by name.
    """

    architecture: str
    model_type: str
    rules: tuple[Rule, ...]
    transformer: Mapping[str, Any] = field(default_factory=dict)  # further arguments of Megatron's TransformerConfig
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that config.json may leave out


def families() -> dict[str, Family]:
    """Every family by architecture: each module of `megarl.bridge.families` holds some, and nothing else lists them."""
    package = importlib.import_module("megarl.bridge.families")
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        for value in vars(loaded).values():
            if isinstance(value, Family):
                found[value.architecture] = value
    return found


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its architecture, or by its model type where it names no architecture."""
    known = families()
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"config.json: architectures = {named!r} must be a list of names.")
    for architecture in named:
        if architecture in known:
            return known[architecture]
    if not named:
        for family in known.values():
            if family.model_type == config.get("model_type"):
                return family
    what = ", ".join(named) or f"of type {config.get('model_type')!r}"
    raise UserError(f"The model is a {what}; megarl knows {', '.join(sorted(known))}.")

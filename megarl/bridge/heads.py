"""Heads that score instead of predicting tokens: they stand in a model where its output layer would.

    checkpoint of a …             names of its head
    causal language model         none: a critic's head is made fresh
    sequence classification       score.weight (K, hidden)
    token classification          score.weight (K, hidden), score.bias (K)
    trl's model with value head   v_head.summary.weight (1, hidden), v_head.summary.bias (1), beside a whole language model,
                                  whose own names may begin with `pretrained_model.`

In the map and in what is exported, a head is `score`: of sequence classification without a bias, of token classification with one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.bridge.family import Dims, Family, Rule, find_family
from megarl.bridge.layout import Shape
from megarl.errors import UserError

WEIGHT, BIAS = "score.weight", "score.bias"
# Under which names checkpoints hold the two, the first that is there counts.
STORED = {
    WEIGHT: ("v_head.summary.weight", "score.weight"),
    BIAS: ("v_head.summary.bias", "score.bias"),
}
PREFIX = "pretrained_model."  # of a body that trl wrapped
_OUTPUT = "output_layer.weight"  # Megatron's name of what a head replaces
_BODY, _WITHOUT_BIAS, _WITH_BIAS = "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"
_ENDINGS = (_WITHOUT_BIAS, _WITH_BIAS, _BODY)
# Of config.json: dropout before the head, which is left out here, and whether there is a bias, which the weights tell.
_OWN_FIELDS = frozenset({"classifier_dropout", "token_classification_bias", "num_labels"})


@dataclass(frozen=True)
class Head:
    """A linear layer from the last hidden state to `labels` scores."""

    labels: int = 1
    bias: bool = False
    fresh: bool = False  # the checkpoint has none (that fits): its weights are drawn
    std: float = 0.0  # of a fresh one's weights, from a normal distribution; 0: all scores begin at 0
    seed: int = 0  # of a fresh one's weights

    @property
    def names(self) -> tuple[str, ...]:
        """Its tensors, by the checkpoint's names."""
        return (WEIGHT, BIAS) if self.bias else (WEIGHT,)

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {WEIGHT: (self.labels, hidden)} | ({BIAS: (self.labels,)} if self.bias else {})

    def on(self, family: Family, dims: Dims) -> tuple[Family, Dims]:
        """The family with this head for its output layer, and the sizes with its labels."""
        rules = tuple(rule for rule in family.rules if rule.megatron != _OUTPUT)
        own = {WEIGHT: "labels hidden", BIAS: "labels"}
        added = tuple(Rule({name: own[name]}, megatron_name(name), stage="last") for name in self.names)
        return replace(family, rules=(*rules, *added)), replace(dims, labels=self.labels)

    def exported(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of config.json that make of a body's configuration one of the model with this head, as transformers reads it. Names
        that the configuration has for so many labels stay."""
        base = find_family(body(config)).architecture.removesuffix(_BODY)
        changes: dict[str, Any] = {"architectures": [base + (_WITH_BIAS if self.bias else _WITHOUT_BIAS)]}
        if config.get("num_labels") is not None:
            changes["num_labels"] = self.labels
        names: Any = config.get("id2label")
        if names is None and _told(config) == self.labels:
            return changes
        if not _name_all(names, self.labels):
            names = {str(number): f"LABEL_{number}" for number in range(self.labels)}
            changes["id2label"] = names
        numbers = config.get("label2id")
        if "id2label" in changes or not (numbers is None or _number_all(numbers, self.labels)):
            changes["label2id"] = {label: int(number) for number, label in names.items()}
        return changes


def found_head(shape: Shape, bias: bool, where: object, name: str) -> Head:
    """The head of a checkpoint whose weight, there `name`, has a shape. UserError for one that is no (labels, hidden)."""
    if len(shape) != 2 or not shape[0]:
        raise UserError(f"{where} has a score head ({name}) of shape {shape}: it must be (labels, hidden size).")
    return Head(labels=shape[0], bias=bias)


def _told(config: Mapping[str, Any]) -> int | None:
    """Of how many labels transformers makes a classifier whose config.json does not name them; None: it is none's."""
    count = config.get("num_labels")
    if isinstance(count, int):
        return count
    return 2 if _architecture(config).endswith((_WITHOUT_BIAS, _WITH_BIAS)) else None


def _name_all(names: Any, labels: int) -> bool:
    """Whether each of so many labels has a name, and nothing else has."""
    numbers = [str(number) for number in range(labels)]
    return (
        isinstance(names, Mapping)
        and sorted(names) == sorted(numbers)
        and all(isinstance(name, str) for name in names.values())
    )


def _number_all(numbers: Any, labels: int) -> bool:
    """Whether names have numbers of such labels."""
    return isinstance(numbers, Mapping) and all(
        type(number) is int and 0 <= number < labels for number in numbers.values()
    )


def megatron_name(name: str) -> str:
    """score.weight is score_head.weight."""
    return name.replace("score.", "score_head.")


def body(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the language model that a head stands on. Nothing is tied: there is no output layer."""
    kept = {key: value for key, value in config.items() if key not in _OWN_FIELDS}
    first = _architecture(config)  # Qwen3ForSequenceClassification stands on Qwen3ForCausalLM
    ending = next((ending for ending in _ENDINGS if first.endswith(ending)), None)
    named = {} if ending is None else {"architectures": [first.removesuffix(ending) + _BODY]}
    return {**kept, **named, "tie_word_embeddings": False}


def _architecture(config: Mapping[str, Any]) -> str:
    """The first that is named."""
    named = config.get("architectures") or [""]
    return named[0] if isinstance(named, list) and isinstance(named[0], str) else ""

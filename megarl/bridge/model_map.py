"""The map of one model: every Hugging Face tensor ↔ every Megatron parameter, proved complete when it is made."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.bridge.family import Dims, Family, Rule, Stage, find_family
from megarl.bridge.hf_config import Rope, check_fields, read_config, read_dims, read_rope
from megarl.bridge.layout import Copy, Join, Shape, Split, interleaved_by_group, uncovered
from megarl.errors import UserError


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter, by its local-spec name with the layer numbered over the whole model."""

    name: str
    te_name: str  # its name in the Transformer Engine spec
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    layer: int | None
    stage: Stage
    split: Split
    join: Join
    groups: int  # query groups of the whole model
    pad_vocabulary: bool
    exported: bool  # False: a copy of what another parameter exports (the output layer with tied embeddings)

    @property
    def replicated(self) -> bool:
        """The same on every tensor-parallel rank."""
        return self.split is Split.NONE

    def local_shape(self, tp_size: int) -> Shape:
        """Shape on one tensor-parallel rank, vocabulary padding included."""
        shapes = [self._share(shape, tp_size) for shape in self.hf_shapes]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def copies(self, tp_rank: int, tp_size: int) -> list[Copy]:
        """All that this rank's tensor holds of the checkpoint. Rows that are vocabulary padding are in no copy."""
        shares = [self._share(shape, tp_size) for shape in self.hf_shapes]
        groups = self.groups // tp_size if self.split is Split.ROWS else self.groups
        result = []
        for piece in self.join([share[0] for share in shares], groups):
            shape, share = self.hf_shapes[piece.part], shares[piece.part]
            starts = [tp_rank * share[axis] if self.split.value == axis else 0 for axis in range(len(share))]
            row = starts[0] + piece.source
            length = min(piece.length, shape[0] - row)
            if length <= 0:
                continue
            columns = tuple(slice(starts[axis], starts[axis] + share[axis]) for axis in range(1, len(share)))
            local_columns = tuple(slice(0, size) for size in share[1:])
            result.append(
                Copy(
                    self.hf_names[piece.part],
                    (slice(row, row + length), *columns),
                    (slice(piece.target, piece.target + length), *local_columns),
                )
            )
        return result

    def _share(self, shape: Shape, tp_size: int) -> Shape:
        """A rank's part of one Hugging Face tensor."""
        axis = self.split.value
        if axis is None:
            return shape
        size = padded(shape[axis], tp_size) if self.pad_vocabulary and axis == 0 else shape[axis]
        if size % tp_size or (self.join is interleaved_by_group and self.groups % tp_size):
            raise UserError(f"Tensor parallelism {tp_size} cannot cut {self.name}, whose tensors are {self.hf_shapes}.")
        return (*shape[:axis], size // tp_size, *shape[axis + 1 :])


def padded(size: int, multiple: int) -> int:
    """`size`, rounded up."""
    return -(-size // multiple) * multiple


class ModelMap:
    """Everything that ties a checkpoint to Megatron: names, shapes, regions, and the arguments that build the model."""

    def __init__(self, family: Family, dims: Dims, rope: Rope, *, tied: bool, norm_eps: float, max_positions: int):
        self.family = family.model_type
        self.dims = dims
        self.tied = tied
        self._family, self._rope, self._norm_eps, self._max_positions = family, rope, norm_eps, max_positions
        self.parameters: list[Parameter] = _parameters(family.rules, dims, tied)
        self.hf_shapes: dict[str, Shape] = {}  # every tensor of the checkpoint, in the order in which it is exported
        for parameter in self.parameters:
            if parameter.exported:
                self.hf_shapes.update(zip(parameter.hf_names, parameter.hf_shapes, strict=True))
        _check_names(self.parameters)
        for tp_size in self.tensor_sizes():
            self.prove(tp_size)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelMap:
        """From a Hugging Face folder, or from its config.json as a dict. Raises UserError for what cannot be mapped."""
        config = source if isinstance(source, Mapping) else read_config(Path(source))
        family = find_family(config)
        check_fields(family, config)
        dims = read_dims(family, config)
        try:
            rope = read_rope(config)
            norm_eps = float(config.get("rms_norm_eps", 1e-6))
            max_positions = int(config.get("max_position_embeddings", 2048))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"config.json has a value of a wrong kind: {error}.") from error
        tied = bool(config.get("tie_word_embeddings", family.defaults.get("tie_word_embeddings", False)))
        return cls(family, dims, rope, tied=tied, norm_eps=norm_eps, max_positions=max_positions)

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {name: parameter for parameter in self.parameters for name in (parameter.name, parameter.te_name)}

    def parameter(self, name: str) -> Parameter:
        """By its name in the local or in the Transformer Engine spec."""
        try:
            return self._by_name[name]
        except KeyError:
            raise UserError(f"The map of {self.family} knows no Megatron parameter {name!r}.") from None

    def padded_vocab_size(self, tp_size: int) -> int:
        return padded(self.dims.vocab, tp_size)

    def transformer_config(self) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig that follow from the model; `activation` is a name, not a function."""
        return {
            "num_layers": self.dims.layers,
            "hidden_size": self.dims.hidden,
            "ffn_hidden_size": self.dims.ffn,
            "num_attention_heads": self.dims.heads,
            "num_query_groups": self.dims.kv_heads,
            "kv_channels": self.dims.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self._norm_eps,
            "gated_linear_unit": True,
            "activation": "silu",
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **self._family.transformer,
        }

    def model_args(self, tp_size: int = 1) -> dict[str, Any]:
        """Arguments of Megatron's GPTModel that follow from the model; the vocabulary padded for `tp_size` ranks."""
        return {
            "vocab_size": self.padded_vocab_size(tp_size),
            "max_sequence_length": self._max_positions,
            "share_embeddings_and_output_weights": self.tied,
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            **self._rope.model_args(),
        }

    def tensor_sizes(self) -> list[int]:
        """The tensor-parallel sizes that the model allows."""
        return _divisors(math.gcd(self.dims.kv_heads, self.dims.heads, self.dims.ffn))

    def check_layout(self, tp: int, pp: int) -> list[str]:
        """What makes tensor and pipeline parallelism of these sizes impossible, a sentence each; empty: nothing."""
        tensor = {
            "key-value heads": self.dims.kv_heads,
            "attention heads": self.dims.heads,
            "MLP units": self.dims.ffn,
        }
        problems = [
            _layout_problem("tensor", tp, tensor),
            _layout_problem("pipeline", pp, {"layers": self.dims.layers}),
        ]
        return [problem for problem in problems if problem]

    def prove(self, tp_size: int) -> None:
        """Raises unless, over all ranks, every element of the checkpoint and of Megatron's tensors is met exactly once.

        Exempt from "once" on the checkpoint's side: what every rank holds whole (norms), and the tied output layer.
        Layers are alike in all but their names, so the first one stands for all.
        """
        regions: dict[str, list[tuple[slice, ...]]] = defaultdict(list)
        shapes: dict[str, Shape] = {}
        for parameter in self.parameters:
            if parameter.layer not in (None, 0):
                continue
            shapes.update(zip(parameter.hf_names, parameter.hf_shapes, strict=True))
            for rank in range(tp_size):
                copies = parameter.copies(rank, tp_size)
                real = _real_shape(parameter, rank, tp_size)
                _demand(parameter.name, real, [copy.local for copy in copies])
                for copy in copies:
                    sizes = [[s.stop - s.start for s in region] for region in (copy.hf, copy.local)]
                    if sizes[0] != sizes[1]:
                        raise ValueError(f"{parameter.name}: {copy} joins regions of different shapes")
                    if parameter.exported and (rank == 0 or not parameter.replicated):
                        regions[copy.hf_name].append(copy.hf)
        for name, shape in shapes.items():
            _demand(name, shape, regions[name])


def _parameters(rules: Iterable[Rule], dims: Dims, tied: bool) -> list[Parameter]:
    rules = tuple(rules)
    first = [rule for rule in rules if rule.stage == "first"]
    layers = [rule for rule in rules if rule.stage == "layer"]
    last = [rule for rule in rules if rule.stage == "last"]
    return [
        *(_parameter(rule, dims, None, tied) for rule in first),
        *(_parameter(rule, dims, layer, tied) for layer in range(dims.layers) for rule in layers),
        *(_parameter(rule, dims, None, tied) for rule in last),
    ]


def _parameter(rule: Rule, dims: Dims, layer: int | None, tied: bool) -> Parameter:
    def named(pattern: str) -> str:
        return pattern if layer is None else pattern.replace("{L}", str(layer))

    copied = tied and rule.tied_to is not None
    names = (rule.tied_to,) if tied and rule.tied_to is not None else tuple(rule.hf)
    return Parameter(
        name=named(rule.megatron),
        te_name=named(rule.te or rule.megatron),
        hf_names=tuple(named(name) for name in names),
        hf_shapes=tuple(dims.shape(shape) for shape in rule.hf.values()),
        layer=layer,
        stage=rule.stage,
        split=rule.split,
        join=rule.join,
        groups=dims.kv_heads,
        pad_vocabulary=rule.pad_vocabulary,
        exported=not copied,
    )


def _check_names(parameters: Iterable[Parameter]) -> None:
    """A name that two rules claim would be written twice."""
    megatron: set[str] = set()
    exported: set[str] = set()
    for parameter in parameters:
        names = {parameter.name, parameter.te_name}
        hf_names = set(parameter.hf_names) if parameter.exported else set()
        if twice := (names & megatron) | (hf_names & exported):
            raise ValueError(f"two rules claim {', '.join(sorted(twice))}")
        if len(set(parameter.hf_names)) != len(parameter.hf_names):
            raise ValueError(f"{parameter.name} is made from the same tensor twice: {parameter.hf_names}")
        megatron |= names
        exported |= hf_names


def _real_shape(parameter: Parameter, rank: int, tp_size: int) -> Shape:
    """The local shape without the rows that are vocabulary padding."""
    shape = parameter.local_shape(tp_size)
    if not parameter.pad_vocabulary:
        return shape
    left = sum(hf_shape[0] for hf_shape in parameter.hf_shapes) - rank * shape[0]
    return (max(0, min(shape[0], left)), *shape[1:])


def _demand(name: str, shape: Shape, regions: list[tuple[slice, ...]]) -> None:
    if 0 in shape and not regions:
        return
    if fault := uncovered(shape, regions):
        raise ValueError(f"the rules do not fit {name} {shape}: {fault}")


def _layout_problem(kind: str, size: int, counts: Mapping[str, int]) -> str | None:
    """A sentence where `size` does not divide every count, with the nearest sizes that do."""
    if size < 1:
        return f"{kind} parallelism must be at least 1, not {size}."
    undivided = [f"{count} {what}" for what, count in counts.items() if count % size]
    if not undivided:
        return None
    legal = _divisors(math.gcd(*counts.values()))
    near = [n for n in legal if n < size][-1:] + [n for n in legal if n > size][:1]
    does = f"{kind} parallelism {size} does not divide the model's {' and '.join(undivided)}"
    return f"{does}; use {' or '.join(map(str, near))}."


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

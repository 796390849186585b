"""The map of one model: every Hugging Face tensor ↔ every Megatron parameter, proved complete when it is made."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.bridge import mtp
from megarl.bridge.family import Dims, Family, Rule, Stage, find_family
from megarl.bridge.heads import Head, body
from megarl.bridge.hf_config import Rope, check_fields, read_config, read_dims, read_rope
from megarl.bridge.layout import Copy, Cut, Join, Part, Shape, Split, Standing, Where, interleaved_by_group, uncovered
from megarl.errors import UserError


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter, by its local-spec name with layers and experts numbered over the whole model."""

    name: str
    te_name: str  # its name in the Transformer Engine spec
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    parts: tuple[Part, ...]  # what these tensors are made of, in the order in which `join` takes them
    layer: int | None
    expert: int | None  # which expert of the layer it belongs to
    experts: int  # of a layer
    stage: Stage
    split: Split
    join: Join
    groups: int  # query groups of the whole model
    pad_vocabulary: bool
    exported: bool  # False: a copy of what another parameter exports (the output layer with tied embeddings)
    float32: bool  # kept in float32 whatever the model's dtype
    fused: bool = False  # the checkpoint has all experts of a layer in one tensor
    transposed: bool = False  # the checkpoint has it transposed

    @property
    def replicated(self) -> bool:
        """The same on every tensor-parallel rank (of an expert: on every expert-tensor-parallel rank)."""
        return self.split is Split.NONE

    def held(self, where: Where) -> bool:
        """Whether a rank holds (its part of) it."""
        return self.expert is None or self._owner(where) == where.expert

    def _owner(self, sizes: Where) -> int:
        """The expert-parallel rank that holds it: experts are shared out in runs."""
        each, rest = divmod(self.experts, sizes.expert_size)
        if rest:
            raise UserError(f"Expert parallelism {sizes.expert_size} cannot share out {self.experts} experts.")
        return (self.expert or 0) // each

    def holders(self, sizes: Where) -> list[Cut]:
        """One rank for each part, which together hold all of it once; of `sizes` only the sizes count."""
        tensor, experts, parts = sizes.tensor_size, sizes.expert_size, sizes.expert_tensor_size
        if self.expert is None:
            return [Cut(rank, tensor, 0, experts, 0, parts) for rank in range(1 if self.replicated else tensor)]
        owner = self._owner(sizes)
        return [Cut(0, tensor, owner, experts, rank, parts) for rank in range(1 if self.replicated else parts)]

    def replica(self, rank: Standing) -> tuple[int, int] | None:
        """Of the ranks that hold the same part: which one this is, and how many there are. None: another tensor-parallel rank
        answers for what is replicated over them."""
        if self.replicated and (rank.tensor if self.expert is None else rank.expert_tensor) != 0:
            return None
        if self.expert is None:
            return rank.data * rank.context_size + rank.context, rank.data_size * rank.context_size
        return rank.expert_data, rank.world // (rank.pipeline_size * rank.expert_size * rank.expert_tensor_size)

    def local_shape(self, where: Where) -> Shape:
        """Shape on a rank, vocabulary padding included."""
        shapes = [self._share(part.shape, self._cut(where)[1]) for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def copies(self, where: Where) -> list[Copy]:
        """All that this rank's tensor holds of the checkpoint. Rows that are vocabulary padding are in no copy."""
        if not self.held(where):
            return []
        rank, size = self._cut(where)
        shares = [self._share(part.shape, size) for part in self.parts]
        groups = self.groups // size if self.split is Split.ROWS else self.groups
        result = []
        for piece in self.join([share[0] for share in shares], groups):
            part, share = self.parts[piece.part], shares[piece.part]
            starts = [rank * share[axis] if self.split.value == axis else 0 for axis in range(len(share))]
            row = starts[0] + piece.source
            length = min(piece.length, part.shape[0] - row)
            if length <= 0:
                continue
            columns = tuple(slice(starts[axis], starts[axis] + share[axis]) for axis in range(1, len(share)))
            local = (slice(piece.target, piece.target + length), *(slice(0, size) for size in share[1:]))
            region = (part.rows(row, length), *columns)
            transposed = self.transposed and len(region) == 2
            if transposed:
                region = region[::-1]
            if self.fused and self.expert is not None:
                region = (slice(self.expert, self.expert + 1), *region)
            result.append(Copy(self.hf_names[part.tensor], region, local, self.fused, transposed))
        return result

    def _cut(self, where: Where) -> tuple[int, int]:
        """Rank and size of the parallelism that cuts it."""
        if self.expert is None:
            return where.tensor, where.tensor_size
        return where.expert_tensor, where.expert_tensor_size

    def _share(self, shape: Shape, parts: int) -> Shape:
        """A rank's part of one Hugging Face tensor."""
        axis = self.split.value
        if axis is None:
            return shape
        size = padded(shape[axis], parts) if self.pad_vocabulary and axis == 0 else shape[axis]
        if size % parts or (self.join is interleaved_by_group and self.groups % parts):
            kind = "Tensor" if self.expert is None else "Expert tensor"
            raise UserError(f"{kind} parallelism {parts} cannot cut {self.name}, whose tensors are {self.hf_shapes}.")
        return (*shape[:axis], size // parts, *shape[axis + 1 :])


def padded(size: int, multiple: int) -> int:
    """`size`, rounded up."""
    return -(-size // multiple) * multiple


class ModelMap:
    """Everything that ties a checkpoint to Megatron: names, shapes, regions, and the arguments that build the model."""

    def __init__(
        self,
        family: Family,
        dims: Dims,
        rope: Rope,
        *,
        tied: bool,
        norm_eps: float,
        max_positions: int,
        settings: Mapping[str, Any] | None = None,
        head: Head | None = None,
        ahead: int = 0,
    ):
        self.family = family.model_type
        self.ahead = ahead  # layers for multi-token prediction that config.json tells of
        self.dims = dims
        self.tied = tied
        self.head = head  # in the place of the output layer
        self._family, self._rope, self._norm_eps, self._max_positions = family, rope, norm_eps, max_positions
        self._settings = {**family.transformer, **(settings or {})}
        if family.latent:
            self._settings |= rope.latent_args()
        self.parameters: list[Parameter] = _parameters(family.rules, dims, tied)
        # names of a tensor and of that which takes its place
        self.ties = [(next(iter(rule.hf)), rule.tied_to) for rule in family.rules if tied and rule.tied_to is not None]
        self.hf_shapes: dict[str, Shape] = {}  # every tensor of the checkpoint, in the order in which it is exported
        for parameter in self.parameters:
            if parameter.exported:
                self.hf_shapes.update(zip(parameter.hf_names, parameter.hf_shapes, strict=True))
        _check_names(self.parameters)
        for tp_size in self.tensor_sizes():
            self.prove(tp_size, tp_size if dims.expert_ffn % tp_size == 0 else 1)

    @classmethod
    def from_hf(
        cls, source: Mapping[str, Any] | str | Path, head: Head | None = None, names: Iterable[str] = ()
    ) -> ModelMap:
        """From a Hugging Face folder, or from its config.json as a dict; with a score head in the place of its output layer where
        one is given. `names`: of a checkpoint's tensors, Hugging Face's or Megatron's; the layers for multi-token prediction that they
        tell of are in the map then. Raises UserError for what cannot be mapped."""
        config = source if isinstance(source, Mapping) else read_config(Path(source))
        if head is not None:
            config = body(config)
        family = find_family(config)
        check_fields(family, config)
        try:
            dims = read_dims(family, config)
            ahead = mtp.count(config) if family.mtp else 0
            settings = family.settings(config) if family.settings is not None else {}
            rope = read_rope(family, config if family.rope is None else family.rope(config))
            norm_eps = float(config.get("rms_norm_eps", family.defaults.get("rms_norm_eps", 1e-6)))
            max_positions = int(config.get("max_position_embeddings", 2048))
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise UserError(f"config.json has a value of a wrong kind: {error}.") from error
        if head is not None:
            family, dims = head.on(family, dims)
        if ahead and (parts := mtp.held(names, dims.layers)) is not None:
            dims = replace(dims, mtp=ahead, parts=dims.parts | parts)
        tied = bool(config.get("tie_word_embeddings", family.defaults.get("tie_word_embeddings", False)))
        return cls(
            family,
            dims,
            rope,
            tied=tied,
            norm_eps=norm_eps,
            max_positions=max_positions,
            settings=settings,
            head=head,
            ahead=ahead,
        )

    def leaves_out(self, name: str) -> bool:
        """Whether a tensor of a checkpoint is of a layer for multi-token prediction, and not in this map."""
        return bool(self.ahead) and not self.dims.mtp and mtp.is_ahead(name, self.dims.layers)

    @property
    def has_experts(self) -> bool:
        """Whether some layers are mixtures of experts."""
        return self.dims.experts > 0

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention: the model is then an MLATransformerConfig's."""
        return self._family.latent

    @property
    def window(self) -> int | None:
        """How many tokens, itself among them, a token attends to in layers with a sliding window; None: there are none."""
        size = self._settings.get("window_size")
        return None if size is None else size[0] + 1

    @property
    def norm_offset(self) -> float:
        """What norms add to their weights before they multiply by them."""
        return float(bool(self._settings.get("layernorm_zero_centered_gamma")))

    @property
    def float32(self) -> frozenset[str]:
        """The checkpoint's tensors that stay float32 whatever dtype the model has."""
        return frozenset(name for parameter in self.parameters if parameter.float32 for name in parameter.hf_names)

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
            **(self._expert_config() if self.has_experts else {}),
            **(self._latent_config() if self.is_latent else {}),
            **self._settings,
        }

    def _expert_config(self) -> dict[str, Any]:
        return {
            "num_moe_experts": self.dims.experts,
            "moe_ffn_hidden_size": self.dims.expert_ffn,
            "moe_shared_expert_intermediate_size": self.dims.shared_ffn or None,
            "moe_layer_freq": [int(self.dims.is_sparse(layer)) for layer in range(self.dims.layers)],
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }

    def _latent_config(self) -> dict[str, Any]:
        return {
            "q_lora_rank": self.dims.q_rank or None,
            "kv_lora_rank": self.dims.kv_rank,
            "qk_head_dim": self.dims.nope_dim,
            "qk_pos_emb_head_dim": self.dims.rope_dim,
            "v_head_dim": self.dims.v_dim,
        }

    def model_args(self, tp_size: int = 1) -> dict[str, Any]:
        """Arguments of Megatron's GPTModel that follow from the model; the vocabulary padded for `tp_size` ranks."""
        return {
            "vocab_size": self.padded_vocab_size(tp_size),
            "max_sequence_length": self._max_positions,
            "share_embeddings_and_output_weights": self.tied,
            "position_embedding_type": "rope",
            **({} if self.is_latent else self._rope.model_args()),
        }

    def config_attributes(self) -> dict[str, Any]:
        """What Megatron's GPTModel reads off its configuration though it is no argument of it."""
        return {} if self.is_latent else self._rope.yarn_attributes()

    def arithmetic(self) -> list[Any]:
        """All that a config.json says of what the model computes: two that are equal in this are one model."""
        said = [self.family, self.tied, self.transformer_config(), self.model_args(), self.config_attributes()]
        return [*said, self.hf_shapes]

    def tensor_sizes(self) -> list[int]:
        """The tensor-parallel sizes that the model allows."""
        return _divisors(math.gcd(*self._cut_by_tensor().values()))

    def _cut_by_tensor(self) -> dict[str, int]:
        """What tensor parallelism must divide."""
        all_sparse = all(self.dims.is_sparse(layer) for layer in range(self.dims.layers))
        return {
            "key-value heads": self.dims.kv_heads,
            "attention heads": self.dims.heads,
            **({} if all_sparse else {"MLP units": self.dims.ffn}),
            **({"units of the shared experts": self.dims.shared_ffn} if self.dims.shared_ffn else {}),
        }

    def check_layout(
        self, tp: int, pp: int, ep: int = 1, expert_tp: int | None = None, *, sequence: bool | None = None
    ) -> list[str]:
        """What makes a layout of these sizes impossible, a sentence each; empty: nothing. `expert_tp` None: as `tp`; `sequence`:
        whether sequence parallelism is on, None: not asked."""
        problems = [
            _layout_problem("tensor", tp, self._cut_by_tensor()),
            _layout_problem("pipeline", pp, {"layers": self.dims.layers}),
        ]
        if self.has_experts:
            problems.append(_layout_problem("expert", ep, {"experts of a layer": self.dims.experts}))
            units = {"units of an expert": self.dims.expert_ffn}
            cut = tp if expert_tp is None else expert_tp
            problems.append(_layout_problem("expert tensor", cut, units))
            if cut > 1 and self._settings.get("add_bias_linear"):
                problems.append(
                    f"expert tensor parallelism {cut} would count the biases of {self.family}'s experts {cut} times; use 1."
                )
            if tp > 1 and sequence is False:
                problems.append(
                    f"tensor parallelism {tp} of a model with experts needs sequence parallelism; set sequence=true."
                )
        else:
            sizes = {"expert": ep, "expert tensor": expert_tp or 1}
            problems += [
                f"{kind} parallelism {size} needs a model with experts, which this is not; use 1."
                for kind, size in sizes.items()
                if size != 1
            ]
        return [problem for problem in problems if problem]

    def prove(self, tp_size: int, expert_tp: int = 1) -> None:
        """Raises unless, over all ranks, every element of the checkpoint and of Megatron's tensors is met exactly once.

        Exempt from "once" on the checkpoint's side: what every rank holds whole (norms), and the tied output layer. Layers of a
        kind are alike in all but their names, and so are a layer's experts: the first stands for all.
        """
        sizes = Cut(tensor_size=tp_size, expert_tensor_size=expert_tp)
        kinds = {self.dims.is_sparse(layer): layer for layer in reversed(range(self.dims.layers))}
        regions: dict[str, list[tuple[slice, ...]]] = defaultdict(list)
        shapes: dict[str, Shape] = {}
        for parameter in self.parameters:
            if parameter.layer not in (None, *kinds.values()):
                continue
            if parameter.expert not in (None, 0) and not parameter.fused:
                continue
            shapes.update(zip(parameter.hf_names, parameter.hf_shapes, strict=True))
            for where in parameter.holders(sizes):
                copies = parameter.copies(where)
                real = _real_shape(parameter, where)
                _demand(parameter.name, real, [copy.local for copy in copies])
                for copy in copies:
                    if copy.extents != [s.stop - s.start for s in copy.local]:
                        raise ValueError(f"{parameter.name}: {copy} joins regions of different shapes")
                    if parameter.exported:
                        regions[copy.hf_name].append(copy.hf)
        for name, shape in shapes.items():
            _demand(name, shape, regions[name])


def _parameters(rules: Iterable[Rule], dims: Dims, tied: bool) -> list[Parameter]:
    rules = tuple(rules)
    first = [rule for rule in rules if rule.stage == "first"]
    layers = [rule for rule in rules if rule.stage == "layer"]
    last = [rule for rule in rules if rule.stage == "last"]
    return [
        *(_parameter(rule, dims, None, None, tied) for rule in first),
        *(
            _parameter(rule, dims, layer, expert, tied)
            for layer in range(dims.layers)
            for rule in layers
            if rule.layers(dims, layer)
            for expert in (range(dims.experts) if rule.of_experts else (None,))
        ),
        *(_parameter(rule, dims, None, None, tied) for rule in last),
        *(
            _parameter(rule, dims, None, expert, tied)
            for rule in mtp.rules(layers, dims)
            for expert in (range(dims.experts) if rule.of_experts else (None,))
        ),
    ]


def _parameter(rule: Rule, dims: Dims, layer: int | None, expert: int | None, tied: bool) -> Parameter:
    def named(pattern: str) -> str:
        name = pattern if layer is None else pattern.replace("{L}", str(layer))
        return name if expert is None else name.replace("{E}", str(expert))

    copied = tied and rule.tied_to is not None
    names = (rule.tied_to,) if tied and rule.tied_to is not None else tuple(rule.hf)
    return Parameter(
        name=named(rule.megatron),
        te_name=named(rule.te or rule.megatron),
        hf_names=tuple(named(name) for name in names),
        hf_shapes=tuple(_stored(rule, dims, dims.shape(shape)) for shape in rule.hf.values()),
        parts=tuple(_parts(rule, dims)),
        layer=layer,
        expert=expert,
        experts=dims.experts,
        stage=rule.stage,
        split=rule.split,
        join=rule.join,
        groups=dims.kv_heads,
        pad_vocabulary=rule.pad_vocabulary,
        exported=not copied,
        float32=rule.float32,
        fused=rule.fused,
        transposed=rule.transposed,
    )


def _parts(rule: Rule, dims: Dims) -> Iterator[Part]:
    for tensor, names in enumerate(rule.hf.values()):
        rows, _, rest = names.partition(" ")
        first = 0
        blocks = dims.blocks(rows)
        for number, count in enumerate(blocks):
            if "|" in rows:
                yield Part(tensor, number, (count, *dims.shape(rest)), len(blocks))
            else:
                yield Part(tensor, first, (count, *dims.shape(rest)))
            first += count


def _stored(rule: Rule, dims: Dims, shape: Shape) -> Shape:
    """The shape of a tensor in the checkpoint."""
    return (*((dims.experts,) if rule.fused else ()), *(shape[::-1] if rule.transposed else shape))


def _check_names(parameters: Iterable[Parameter]) -> None:
    """A name that two rules claim would be written twice."""
    megatron: set[str] = set()
    exported: set[str] = set()
    for parameter in parameters:
        names = {parameter.name, parameter.te_name}
        hf_names = set(parameter.hf_names) if parameter.exported else set()
        if parameter.fused:  # each expert claims its part
            hf_names = {f"{name}[{parameter.expert}]" for name in hf_names}
        if twice := (names & megatron) | (hf_names & exported):
            raise ValueError(f"two rules claim {', '.join(sorted(twice))}")
        if len(set(parameter.hf_names)) != len(parameter.hf_names):
            raise ValueError(f"{parameter.name} is made from the same tensor twice: {parameter.hf_names}")
        megatron |= names
        exported |= hf_names


def _real_shape(parameter: Parameter, where: Where) -> Shape:
    """The local shape without the rows that are vocabulary padding."""
    shape = parameter.local_shape(where)
    if not parameter.pad_vocabulary:
        return shape
    left = sum(hf_shape[0] for hf_shape in parameter.hf_shapes) - where.tensor * shape[0]
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

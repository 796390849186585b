"""What a model family says about itself: a table of rules and the config fields it understands."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.bridge import fields
from megarl.bridge.layout import Join, Shape, Split, interleaved_by_group, stacked
from megarl.errors import UserError

Stage = Literal["first", "layer", "last", "mtp"]  # the last: layers for multi-token prediction (mtp.py)
Config = fields.Config
# Fields that say how many layers for multi-token prediction there are; transformers has both names.
MTP = ("num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True)
class Dims:
    """The sizes that tensor shapes are made of. Those below `vocab` are 0 where a family has no such thing."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int  # of a query and a key
    vocab: int
    # Mixture of experts
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0  # the shared experts together, which are one MLP
    sparse: tuple[bool, ...] = ()  # layer by layer: whether its MLP is experts; empty: none is
    # Multi-head latent attention
    q_rank: int = 0  # 0: queries are projected at once
    kv_rank: int = 0
    nope_dim: int = 0  # of a head's query and key: the part without, and the part with positions
    rope_dim: int = 0
    v_dim: int = 0
    mtp: int = 0  # layers for multi-token prediction
    labels: int = 0  # scores of a head in the output layer's place
    parts: frozenset[str] = frozenset()  # names of what this model has and others of its family lack (see `with_part`)

    @property
    def q(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def kv_down(self) -> int:
        """Rows of the projection to the latent, with the key's positional part, which all heads share."""
        return self.kv_rank + self.rope_dim

    @property
    def kv_up(self) -> int:
        """Rows of the projection from the latent: head by head, its key without positions, then its value."""
        return self.heads * (self.nope_dim + self.v_dim)

    @property
    def v(self) -> int:
        """All heads' values, what attention answers with."""
        return self.heads * self.v_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts. Layers for multi-token prediction, which count on, are as the last one."""
        return bool(self.sparse) and self.sparse[min(layer, self.layers - 1)]

    def shape(self, names: str) -> Shape:
        """`"q hidden"` → (heads x head_dim, hidden); `"ffn+ffn hidden"` → (2 x ffn, hidden)."""
        return tuple(sum(self.blocks(name)) for name in names.split())

    def blocks(self, name: str) -> list[int]:
        """Of one axis: `"ffn+ffn"` → two blocks of ffn; `"ffn|ffn"` the same."""
        return [getattr(self, part) for part in name.replace("|", "+").split("+")]


def everywhere(dims: Dims, layer: int) -> bool:
    """A rule that holds in every layer."""
    return True


def with_part(name: str) -> Callable[[Dims, int], bool]:
    """A rule that holds in every layer of models that have a part, as a family's `derive` says in `Dims.parts`."""
    return lambda dims, layer: name in dims.parts


@dataclass(frozen=True)
class Rule:
    """Some Hugging Face tensors ↔ one Megatron parameter.

    `{L}` in a name stands for every layer, `{E}` for every expert of it, both numbered over the whole model. `hf` maps each name
    to its shape in the names of `Dims`; their order is the order in which `join` lays them down. Rows that are a sum (`ffn+ffn`)
    are so many parts of their own, which are cut and laid down one by one; with `ffn|ffn` their rows take turns. Where Megatron's
    name has `{E}` and the checkpoint's has not, all experts of a layer are one tensor there, whose first axis they are. `te` is
    the parameter's name in Megatron's Transformer Engine spec where that differs from the local spec's.
    """

    hf: Mapping[str, str]
    megatron: str
    split: Split = Split.NONE
    join: Join = stacked
    te: str | None = None
    stage: Stage = "layer"  # the pipeline stage that holds it
    layers: Callable[[Dims, int], bool] = everywhere  # of a layer's rule: the layers that have it
    pad_vocabulary: bool = False  # rows are the vocabulary: padded with zeros to a multiple of TP, cut on export
    tied_to: str | None = None  # with tied embeddings: the tensor that it is filled from, and is not written to
    float32: bool = False  # kept in float32 whatever the model's dtype
    transposed: bool = (
        False  # the checkpoint has the matrices transposed; `hf` states their shapes as Megatron has them
    )

    def __post_init__(self) -> None:
        """Raises ValueError for rows laid down as Megatron does not have them, which no count of elements would show."""
        by_group = ".self_attention.linear_qkv." in self.megatron
        if by_group and self.join is not interleaved_by_group:
            raise ValueError(f"{self.megatron}: Megatron has these rows group by group; give join=interleaved_by_group")

    @property
    def fused(self) -> bool:
        return self.of_experts and not any("{E}" in name for name in self.hf)

    @property
    def of_experts(self) -> bool:
        return "{E}" in self.megatron


@dataclass(frozen=True)
class Family:
    """One architecture of `transformers`, as Megatron runs it.

    `requires` lists, for config fields that would change the arithmetic, the values under which the rules are exact;
    `ignores` the fields that say nothing about the arithmetic. A field in no list is refused by name. What a table cannot say,
    `derive` computes from the config and the sizes read so far (further fields of `Dims`) and `settings` from the config
    (further arguments of TransformerConfig); both read `reads` and raise UserError for what is not exact. `rope` gives what
    config.json says about rotary positions in the fields that most families have (`read_rope`), where it says that otherwise.
    """

    architecture: str
    model_type: str
    rules: tuple[Rule, ...]
    transformer: Mapping[str, Any] = field(default_factory=dict)  # further arguments of Megatron's TransformerConfig
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that config.json may leave out
    sizes: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # further Dims: the fields that hold each, any of them
    reads: frozenset[str] = frozenset()
    derive: Callable[[Config, Mapping[str, int]], Mapping[str, Any]] | None = None
    settings: Callable[[Config], Mapping[str, Any]] | None = None
    rope: Callable[[Config], Config] | None = None
    yarn: bool = False  # YaRN is understood, without latent attention
    mtp: bool = False  # layers for multi-token prediction are understood

    @property
    def latent(self) -> bool:
        """Multi-head latent attention: positions belong to the attention, not to the model."""
        return bool(self.transformer.get("multi_latent_attention"))

    @property
    def understands(self) -> frozenset[str]:
        """The fields of config.json that this family reads beside those that all do."""
        return self.reads | {name for names in self.sizes.values() for name in names} | set(MTP if self.mtp else ())


def families() -> dict[str, Family]:
    """Every family by architecture: each module of `megarl.bridge.families` holds some, and nothing else lists them. Raises
    UserError, naming the module, where one cannot be loaded."""
    package = importlib.import_module("megarl.bridge.families")
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(package.__path__):
        try:
            loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        except Exception as error:
            raise UserError(f"The family in {package.__name__}.{module.name} cannot be loaded: {error!r}.") from error
        for value in vars(loaded).values():
            if isinstance(value, Family):
                found[value.architecture] = value
    return found


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its architecture, or by its model type where it names no architecture."""
    known = families()
    named = config.get("architectures")
    named = [] if named is None else named
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"config.json: architectures = {fields.short(named)} must be a list of names.")
    found = [known[architecture] for architecture in dict.fromkeys(named) if architecture in known]
    if len(found) > 1:
        raise UserError(
            f"config.json: architectures = {fields.short(named, 200)} names models of more than one family."
        )
    if found:
        _demand_type(config, found[0], [family.model_type for family in known.values()])
        return found[0]
    if not named:
        for family in known.values():
            if family.model_type == config.get("model_type"):
                return family
    what = fields.cut(", ".join(named)) or f"of type {fields.short(config.get('model_type'))}"
    raise UserError(f"The model is a {what}; megarl knows {', '.join(sorted(known))}.")


def _demand_type(config: Config, family: Family, types: Collection[str]) -> None:
    """`transformers` goes by the model type. A model with code of its own may call itself as it likes, but not as another family."""
    kind = config.get("model_type")
    if kind not in (None, family.model_type) and ("auto_map" not in config or kind in types):
        raise UserError(
            f"config.json: model_type = {fields.short(kind)} and architectures = [{family.architecture!r}] disagree: the type of that "
            f"architecture is {family.model_type!r}."
        )

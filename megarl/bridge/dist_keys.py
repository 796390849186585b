"""Under which keys, and where in them, a checkpoint of Megatron holds the parameters of a model.

A key's tensor is the parameter of a rank that has all of it, so the map's `Cut()` says what lies in it. Three choices of whoever wrote
the checkpoint change the key (Megatron's `sharded_state_dict` and its `metadata`):

    layers    one key a kind of parameter, with the layers as the first axis; or one key a layer, where layers differ
    experts   one key a kind, with the experts as the next axis; or one key an expert
    gate, up  one above the other; or, with one key an expert, `…_w` and `…_v`
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

from megarl.bridge.layout import Cut, Shape
from megarl.bridge.model_map import ModelMap, Parameter

_LAYER = re.compile(r"(decoder\.layers)\.\d+\.")
# Transformer Engine's grouped experts, and the local spec's, which are modules each.
_GROUPED = re.compile(r"(mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")
_LOCAL = re.compile(r"(mlp\.experts)\.local_experts\.(\d+)\.")
EXTRA = "_extra_state"  # where Transformer Engine keeps float8's scales; Megatron wants it of every layer, be it empty


@dataclass(frozen=True)
class Slot:
    """A run of rows of a parameter (of a rank that has all of it), and the tensor of a checkpoint that they are."""

    key: str
    index: Shape  # in the axes that the checkpoint adds in front: of layers, of experts
    axes: Shape  # the lengths of these
    rows: slice
    shape: Shape  # of the rows

    @property
    def global_shape(self) -> Shape:
        return (*self.axes, *self.shape)

    @property
    def offsets(self) -> Shape:
        return (*self.index, *(0 for _ in self.shape))

    @property
    def sizes(self) -> Shape:
        """Of the region, leading axes included."""
        return (*(1 for _ in self.index), *self.shape)


def written(model: ModelMap, parameter: Parameter) -> Slot:
    """Where a parameter is put: as Megatron does for the model unless it is told otherwise."""
    return _slots(model, parameter, parameter.te_name, by_layer=model.has_experts, by_expert=False, halves=False)[0]


def found(model: ModelMap, parameter: Parameter, keys: Container[str]) -> list[Slot]:
    """Where a checkpoint with these keys has a parameter; empty: nowhere."""
    for slots in _candidates(model, parameter):
        if all(slot.key in keys for slot in slots):
            return slots
    return []


def extra_states(model: ModelMap) -> list[str]:
    """Keys of the empty objects that Megatron expects beside the parameters of layers."""
    keys: dict[str, None] = {}
    for parameter in model.parameters:
        outside = parameter.stage in ("first", "last") and parameter.name != "decoder.final_layernorm.weight"
        if outside or parameter.pad_vocabulary or ".mlp.router." in parameter.name:
            continue
        slot = written(model, parameter)
        place = f"shard_{'.'.join(map(str, slot.index or (0,)))}_{'.'.join(map(str, slot.axes or (1,)))}"
        module = slot.key.rpartition(".")[0]
        keys[f"{module}.{EXTRA}/{place}"] = None
        layer, attention, _ = slot.key.partition(".self_attention.")
        if attention:
            keys[f"{layer}{attention}core_attention.{EXTRA}/{place}"] = None
    return list(keys)


def _candidates(model: ModelMap, parameter: Parameter) -> Iterator[list[Slot]]:
    """The likeliest first: what `written` says."""
    halved = parameter.name.endswith(("linear_fc1.weight", "linear_fc1.bias"))
    by_layers = (model.has_experts, not model.has_experts)
    for name in dict.fromkeys((parameter.te_name, parameter.name)):
        for by_layer in by_layers if parameter.layer is not None else (True,):
            for by_expert in (False, True) if parameter.expert is not None else (True,):
                for halves in (False, True) if halved else (False,):
                    yield _slots(model, parameter, name, by_layer=by_layer, by_expert=by_expert, halves=halves)


def _slots(
    model: ModelMap, parameter: Parameter, name: str, *, by_layer: bool, by_expert: bool, halves: bool
) -> list[Slot]:
    index, axes, key = [], [], name
    if parameter.layer is not None and not by_layer:
        key = _LAYER.sub(r"\1.", key)
        index.append(parameter.layer)
        axes.append(model.dims.layers)
    if parameter.expert is not None:
        number = f"{parameter.expert}." if by_expert else ""
        key = _GROUPED.sub(rf"\1.experts.{number}\2.\3", key)
        key = _LOCAL.sub(rf"\1.experts.{number}", key)
        if not by_expert:
            index.append(parameter.expert)
            axes.append(parameter.experts)
    shape = parameter.local_shape(Cut())
    parts = 2 if halves else 1
    each = shape[0] // parts
    return [
        Slot(
            key + (("_w", "_v")[part] if halves else ""),
            tuple(index),
            tuple(axes),
            slice(part * each, (part + 1) * each),
            (each, *shape[1:]),
        )
        for part in range(parts)
    ]

"""Which parameters are frozen, and how much of the learning rate each one gets: patterns of names, and the depth of its layer.

A pattern is a shell pattern (`*`, `?`, `[..]`) on a tensor's name in the checkpoint ("model.layers.0.mlp.*") or on the name
that Megatron's local spec has for it ("decoder.layers.0.mlp.*"), layers numbered over the whole model. What is decided is
decided for each tensor of the checkpoint: a parameter that Megatron joins from several of them needs one answer for all, and
copies of a tied embedding share theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from megarl.bridge.model_map import ModelMap, Parameter


def frozen(model_map: ModelMap, patterns: Sequence[str]) -> set[str]:
    """Megatron names of the parameters that match any pattern."""
    chosen = _by_parameter(model_map, lambda names: any(_matches(names, pattern) for pattern in patterns))
    return {name for name, yes in chosen.items() if yes}


def lr_scales(model_map: ModelMap, multipliers: Mapping[str, float], layer_decay: float = 1.0) -> dict[str, float]:
    """Megatron name -> factor of the learning rate: the product of all multipliers whose pattern matches, times
    layer_decay^depth.

    Depth counts from the output: 0 for the output layer and the final norm, 1 for the last layer, L for the first of L layers,
    L + 1 for the embedding, also where it is tied to the output (layer-wise decay of arXiv:2003.10555, there without the head's
    own learning rate).
    """
    depth = _depths(model_map)

    def scale(names: frozenset[str]) -> float:
        result = layer_decay ** max(depth.get(name, 0) for name in names)
        for pattern, multiplier in multipliers.items():
            result *= multiplier if _matches(names, pattern) else 1.0
        return result

    return _by_parameter(model_map, scale)


def problems(
    model_map: ModelMap, patterns: Sequence[str], multipliers: Mapping[str, float], where: str = "actor.optimizer"
) -> list[str]:
    """What is wrong with patterns for this model, a sentence each: one that matches nothing, one that would tear a parameter,
    and patterns that freeze everything."""
    found = []
    names = {name for alias in _aliases(model_map).values() for name in alias}
    for key, given in (("frozen", list(patterns)), ("lr_multipliers", list(multipliers))):
        found += [
            f"{where}.{key} has {pattern!r}, which matches no parameter of this model; "
            f"the nearest name is {_nearest(pattern, names)!r}"
            for pattern in given
            if not _matches(names, pattern)
        ]
    for key, decide in (
        ("frozen", lambda: frozen(model_map, patterns)),
        ("lr_multipliers", lambda: lr_scales(model_map, multipliers)),
    ):
        try:
            decide()
        except ValueError as error:
            found.append(f"{where}.{key}: {error}")
    if not found and len(frozen(model_map, patterns)) == len(model_map.parameters):
        found.append(f"{where}.frozen freezes every parameter, so there is nothing to train; leave some out")
    return found


def _by_parameter(model_map: ModelMap, decide: Callable) -> dict[str, object]:
    """Megatron name -> decide(all names of a tensor of the checkpoint), where all tensors in the parameter agree.

    Raises ValueError, one sentence, where they do not.
    """
    answers = {name: decide(names) for name, names in _aliases(model_map).items()}
    result = {}
    for parameter in model_map.parameters:
        values = {name: answers[name] for name in parameter.hf_names}
        if len(set(values.values())) > 1:
            raise ValueError(_torn(parameter, values))
        result[parameter.name] = next(iter(values.values()))
    return result


def _torn(parameter: Parameter, values: Mapping[str, object]) -> str:
    apart = ", ".join(f"{name} ({value})" for name, value in values.items())
    return f"{parameter.name} is one tensor in Megatron, but its parts would differ: {apart}; name all of them, or none"


def _aliases(model_map: ModelMap) -> dict[str, frozenset[str]]:
    """Tensor of the checkpoint -> its name and the Megatron names of every parameter that holds it."""
    names: dict[str, set[str]] = defaultdict(set)
    for parameter in model_map.parameters:
        for name in parameter.hf_names:
            names[name] |= {name, parameter.name}
    return {name: frozenset(found) for name, found in names.items()}


def _depths(model_map: ModelMap) -> dict[str, int]:
    """Megatron name -> depth, for the parameters that the checkpoint's tensors belong to."""
    layers = model_map.dims.layers

    def depth(parameter: Parameter) -> int:
        if parameter.layer is not None:
            return layers - parameter.layer
        return layers + 1 if parameter.stage == "first" else 0

    return {parameter.name: depth(parameter) for parameter in model_map.parameters}


def _matches(names: frozenset[str] | set[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _nearest(pattern: str, names: set[str]) -> str:
    from difflib import SequenceMatcher

    return max(sorted(names), key=lambda name: SequenceMatcher(None, pattern, name).ratio())

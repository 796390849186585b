"""What is given is checked where it comes in: numbers and choices by value, tensors by shape. One sentence each that names it."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

from torch import Tensor


def is_number(value: Any) -> bool:
    """A finite real number that a float can hold; True and False are none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
    except OverflowError:
        return False


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    none: bool = False,
) -> None:
    """ValueError unless the value is a finite number above `above`, of `least` to `most`; or None, where that may be."""
    if value is None and none:
        return
    holds = (
        is_number(value)
        and (above is None or value > above)
        and (least is None or value >= least)
        and (most is None or value <= most)
    )
    if holds:
        return
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", above), ("at least", least), ("at most", most))
        if bound is not None
    ]
    kind = [] if bounds and is_number(value) else ["a finite number"]
    wanted = " ".join([*kind, " and ".join(bounds)]).strip()
    raise ValueError(f"{name} is {value!r}; it must be {wanted}{', or none' if none else ''}")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """ValueError unless the value is one of these."""
    if isinstance(value, Tensor) or value not in choices:
        raise ValueError(f"{name} is {value!r}; it may be {', '.join(map(str, choices))}")


def check_flag(name: str, value: Any) -> None:
    """ValueError unless the value is True or False: a word like "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")


def check_shapes(**tensors: Any) -> None:
    """ValueError unless each tensor has the dimensions that the letters after its last underscore name, and a letter is the
    same number in all of them; the first one sets the measure. None is passed over.

    A shape that does not fit often broadcasts, and the result is wrong without a word.
    """
    sizes: dict[str, int] = {}
    first, *_ = tensors
    for name, values in tensors.items():
        if values is None:
            continue
        letters = name.rpartition("_")[2]
        if not isinstance(values, Tensor):
            raise ValueError(f"{name} is of type {type(values).__name__}; it must be a tensor")
        shape = values.shape
        if len(shape) == len(letters) and all(
            sizes.setdefault(letter, size) == size for letter, size in zip(letters, shape, strict=True)
        ):
            continue
        beside = "" if name == first else f", {'the mask' if first == 'mask_BT' else first} is {_of(tensors[first])}"
        wanted = ", ".join(str(sizes.get(letter, letter)) for letter in letters) + ("," if len(letters) == 1 else "")
        raise ValueError(f"{name} is {_of(values)}{beside}; it must be ({wanted})")


def _of(values: Tensor) -> tuple[int, ...]:
    return tuple(values.shape)

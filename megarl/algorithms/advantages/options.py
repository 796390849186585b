"""What an option may be. One sentence names the estimator, the option, and what would be right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from megarl.algorithms.checks import check_flag, is_number
from megarl.algorithms.groups import SINGLETONS

LARGEST = 2**31 - 1


def check_choice(estimator: str, option: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{estimator}: {option} is {value!r}; it may be {', '.join(map(repr, choices))}")


def check_singleton(estimator: str, value: Any) -> None:
    check_choice(estimator, "singleton", value, SINGLETONS)


def check_bools(estimator: str, **options: Any) -> None:
    """Nothing but True and False: the text "none" would count as true."""
    for option, value in options.items():
        check_flag(f"{estimator}: {option}", value)


def check_fraction(estimator: str, option: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{estimator}: {option} is {value!r}; it must lie in 0..1")
    return float(value)


def check_eps(estimator: str, value: Any) -> float:
    if not is_number(value) or value < 0:
        raise ValueError(f"{estimator}: eps is {value!r}; it must be a finite number from 0")
    return float(value)


def check_positive(estimator: str, option: str, value: Any, least: float = 0.0, most: float = math.inf) -> float:
    """Above 0, and within bounds that leave a division by it in range."""
    if not is_number(value) or not least <= value <= most or not value > 0:
        bounds = f"in {least:g}..{most:g}" if least else "above 0"
        raise ValueError(f"{estimator}: {option} is {value!r}; it must be a finite number {bounds}")
    return float(value)


def check_count(estimator: str, option: str, value: Any) -> int | None:
    """A whole number from 1, of any integer type, as an int; or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= LARGEST:
        raise ValueError(f"{estimator}: {option} is {value!r}; it must be a whole number from 1, or none")
    return int(value)


def check_weights(estimator: str, option: str, value: Any, wanted: int) -> list[float]:
    """As many finite numbers as there are rewards a sample; all 1 for None."""
    if value is None:
        return [1.0] * wanted
    numbers = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    if not isinstance(numbers, Sequence) or isinstance(numbers, str | bytes) or not all(map(is_number, numbers)):
        raise ValueError(
            f"{estimator}: {option} is {value!r}; it must be a list of finite numbers, one a reward, or none"
        )
    if len(numbers) != wanted:
        raise ValueError(f"{estimator}: {option} has {len(numbers)} numbers, there are {wanted} rewards a sample")
    return [float(number) for number in numbers]

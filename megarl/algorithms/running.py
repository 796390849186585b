"""Mean and variance of a stream that nobody keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from megarl.algorithms.checks import is_number


class RunningStatistics:
    """Count, mean and sum of squared distances of all values so far, in float64, by the pairwise update of Chan, Golub and LeVeque
    (Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979, eq. 2.1):

        n = n_a + n_b,  d = mean_b - mean_a,  mean = mean_a + d n_b / n,  M = M_a + M_b + d^2 n_a n_b / n

    Exact, not an estimate that forgets: the stream may be cut into updates, and updates into ranks that are merged, in any way,
    with the same result to float64's rounding. A stream of equal values has a variance of exactly 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def variance(self) -> float:
        """Unbiased (n - 1); 0 before the second value."""
        return self._squares / (self.count - 1) if self.count > 1 else 0.0

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def update(self, values: Tensor) -> None:
        """Add all values of a tensor of any shape. ValueError on one that is not finite, or too large to square:
        it would never leave again."""
        if not values.numel():
            return
        values = values.detach().cpu().double().flatten()
        finite = values.isfinite()
        if not bool(finite.all()):
            at = int((~finite).nonzero()[0])
            raise ValueError(
                f"value {at} of {len(values)} is {float(values[at])}; running statistics take finite numbers"
            )
        # Of the distances to the smallest: the mean of equal values is then that very value.
        least = values.amin()
        above = values - least
        mean_above = above.mean()
        squares = (above - mean_above).square().sum()
        self._add(len(values), float(least + mean_above), float(squares))

    def merge(self, other: RunningStatistics) -> None:
        """Add what another has seen, on another rank for instance; `other` stays as it is. ValueError as in `update`."""
        self._add(other.count, other.mean, other._squares)

    def state_dict(self) -> dict[str, float]:
        """Plain numbers; JSON keeps them to the last bit."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """ValueError where the state is not one of `state_dict`."""
        if not isinstance(state, Mapping) or set(state) != {"count", "mean", "squares"}:
            raise ValueError(f"running statistics are count, mean and squares, not {state!r}")
        count, mean, squares = (state[name] for name in ("count", "mean", "squares"))
        possible = all(map(is_number, (count, mean, squares))) and count == int(count) >= 0 and squares >= 0
        if not possible or (squares and count < 2) or (mean and not count):
            raise ValueError(f"running statistics cannot be {dict(state)}: no stream of finite numbers has these")
        self.count, self.mean, self._squares = int(count), float(mean), float(squares)

    def _add(self, count: int, mean: float, squares: float) -> None:
        if not count:
            return
        total = self.count + count
        distance = mean - self.mean
        squares = self._squares + squares + distance * distance * self.count * count / total
        if not math.isfinite(squares):
            raise ValueError(f"values about {mean} are too far apart for running statistics: their squares overflow")
        self._squares = squares
        # Written so that the larger side moves least and the first update gives the mean itself.
        self.mean = self.mean + distance * count / total if self.count else mean
        self.count = total

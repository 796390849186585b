"""The coefficient of the KL penalty over training: fixed, or steered towards a KL that was asked for."""

from __future__ import annotations

import math
from typing import Protocol

from megarl.algorithms.checks import check_number

LEAST, MOST = 1e-12, 1e12  # of a coefficient that is steered: beyond these no step would bring it back


class KLController(Protocol):
    """`coefficient` is in force until the next `update`; the state is that of a checkpoint."""

    coefficient: float

    def update(self, kl: float, samples: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKL:
    """Always the same coefficient."""

    def __init__(self, coefficient: float):
        check_number("coefficient of the KL controller", coefficient, least=0)
        self.coefficient = float(coefficient)

    def update(self, kl: float, samples: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The coefficient stays what it was built with: the configuration's word counts, also of a resumed run."""


class AdaptiveKL:
    """Proportional control in log space (arXiv:1909.08593, sec. 2.2):

        e = clip(kl / target - 1, -0.2, 0.2),   coefficient <- coefficient (1 + e samples / horizon)

    target: the KL to hold (nats, in the unit that `update` is given, by token or by sequence).
    horizon: samples in which the coefficient can change by a fifth at most; the paper's gain of 0.1 is a horizon of ten
    batches. The coefficient stays within 1e-12..1e12. ValueError on values that are not positive.
    """

    def __init__(self, coefficient: float, target: float, horizon: float):
        self.coefficient = _steered(coefficient)
        check_number("target of the KL controller", target, above=0)
        check_number("horizon of the KL controller", horizon, least=1)
        self.target, self.horizon = float(target), float(horizon)

    def update(self, kl: float, samples: int) -> None:
        """After a step of so many samples with this mean KL. ValueError on a KL that is not finite, and on less than no samples."""
        if not math.isfinite(kl):
            raise ValueError(f"the KL controller was given a KL of {kl}")
        check_number("samples of the KL controller", samples, least=0)
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        # More samples than the horizon in one step: no more than the whole fifth, and never below 0.
        moved = self.coefficient * (1 + error * min(samples / self.horizon, 1.0))
        self.coefficient = min(max(moved, LEAST), MOST)

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """ValueError where the state is not one of `state_dict`."""
        if "coefficient" not in state:
            raise ValueError(f"the state of the KL controller is {state}; it must hold its coefficient")
        self.coefficient = _steered(state["coefficient"])


def kl_controller(coefficient: float, target: float | None = None, horizon: float = 10_000) -> KLController:
    """Fixed without a target, adaptive with one."""
    return FixedKL(coefficient) if target is None else AdaptiveKL(coefficient, target, horizon)


def _steered(coefficient: float) -> float:
    check_number("coefficient of the KL controller", coefficient, above=0)
    check_number("coefficient of the KL controller", coefficient, least=LEAST, most=MOST)
    return float(coefficient)

"""The coefficient of the KL penalty over training: fixed, or steered towards a KL that was asked for."""

from __future__ import annotations

import math
from typing import Protocol


class KLController(Protocol):
    """`coefficient` is in force until the next `update`; the state is that of a checkpoint."""

    coefficient: float

    def update(self, kl: float, samples: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKL:
    """Always the same coefficient."""

    def __init__(self, coefficient: float):
        self.coefficient = _checked("coefficient", coefficient, least=0.0)

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
    batches. ValueError on values that are not positive.
    """

    def __init__(self, coefficient: float, target: float, horizon: float):
        self.coefficient = _checked("coefficient", coefficient, least=math.ulp(0.0))
        self.target = _checked("target", target, least=math.ulp(0.0))
        self.horizon = _checked("horizon", horizon, least=1.0)

    def update(self, kl: float, samples: int) -> None:
        """After a step of so many samples with this mean KL. ValueError on a KL that is not finite."""
        if not math.isfinite(kl):
            raise ValueError(f"the KL controller was given a KL of {kl}")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        # More samples than the horizon in one step: no more than the whole fifth, and never below 0.
        self.coefficient *= 1 + error * min(samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = _checked("coefficient", state["coefficient"], least=math.ulp(0.0))


def kl_controller(coefficient: float, target: float | None = None, horizon: float = 10_000) -> KLController:
    """Fixed without a target, adaptive with one."""
    return FixedKL(coefficient) if target is None else AdaptiveKL(coefficient, target, horizon)


def _checked(name: str, value: float, least: float) -> float:
    if not (math.isfinite(value) and value >= least):
        wanted = "not be negative" if least == 0 else f"be at least {least:g}" if least >= 1 else "be above 0"
        raise ValueError(f"{name} of the KL controller is {value}; it must {wanted}")
    return float(value)

"""The mathematics: advantages, policy losses, KL, aggregation. Pure functions on padded (B, T) tensors and a mask.

B sequences, T response tokens; the suffix of a name is its shape. What holds everywhere: statistics in float32 (float64
stays), inputs are never changed, nothing loops over samples, groups or tokens, and a masked position never influences a
value or a gradient, whatever it holds. Formulas and sources: docs/algorithms.md.

Names resolve on first use, so that checking a configuration's scalars does not pay for importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.algorithms.advantages import Advantage, advantage, get_advantage
    from megarl.algorithms.aggregation import Denominators, aggregate, denominators
    from megarl.algorithms.divergence import kl
    from megarl.algorithms.objective import Objective, ObjectiveResult
    from megarl.algorithms.policy_losses import PolicyLoss, get_policy_loss, policy_loss
    from megarl.algorithms.registry import call

_HOME = {
    "Advantage": "advantages",
    "advantage": "advantages",
    "get_advantage": "advantages",
    "Denominators": "aggregation",
    "aggregate": "aggregation",
    "denominators": "aggregation",
    "Objective": "objective",
    "ObjectiveResult": "objective",
    "PolicyLoss": "policy_losses",
    "policy_loss": "policy_losses",
    "get_policy_loss": "policy_losses",
    "call": "registry",
    "kl": "divergence",
}
__all__ = [
    "Advantage",
    "Denominators",
    "Objective",
    "ObjectiveResult",
    "PolicyLoss",
    "advantage",
    "aggregate",
    "call",
    "denominators",
    "get_advantage",
    "get_policy_loss",
    "kl",
    "policy_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

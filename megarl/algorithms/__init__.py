"""The mathematics: advantages, losses, KL, aggregation, shaping, correction. Pure functions on padded (B, T) tensors and a mask.

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
    from megarl.algorithms.diagnostics import off_policy_diagnostics
    from megarl.algorithms.divergence import full_kl, kl
    from megarl.algorithms.kl_control import kl_controller
    from megarl.algorithms.objective import Objective, ObjectiveResult
    from megarl.algorithms.policy_losses import PolicyLoss, get_policy_loss, policy_loss
    from megarl.algorithms.registry import call
    from megarl.algorithms.rollout_correction import Correction, CorrectionSettings, correct
    from megarl.algorithms.running import RunningStatistics
    from megarl.algorithms.shaping import (
        RewardLessKL,
        clip_scores,
        informative,
        keep_finished,
        normalize_scores,
        overlong_penalty,
        subtract_kl,
    )
    from megarl.algorithms.value_loss import ValueObjective

_NAMES = {
    "advantages": (
        "Advantage",
        "advantage",
        "get_advantage",
    ),
    "aggregation": (
        "Denominators",
        "aggregate",
        "denominators",
    ),
    "diagnostics": ("off_policy_diagnostics",),
    "divergence": (
        "full_kl",
        "kl",
    ),
    "kl_control": ("kl_controller",),
    "objective": (
        "Objective",
        "ObjectiveResult",
    ),
    "policy_losses": (
        "PolicyLoss",
        "get_policy_loss",
        "policy_loss",
    ),
    "registry": ("call",),
    "rollout_correction": (
        "Correction",
        "CorrectionSettings",
        "correct",
    ),
    "running": ("RunningStatistics",),
    "shaping": (
        "RewardLessKL",
        "clip_scores",
        "informative",
        "keep_finished",
        "normalize_scores",
        "overlong_penalty",
        "subtract_kl",
    ),
    "value_loss": ("ValueObjective",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "Advantage",
    "Correction",
    "CorrectionSettings",
    "Denominators",
    "Objective",
    "ObjectiveResult",
    "PolicyLoss",
    "RewardLessKL",
    "RunningStatistics",
    "ValueObjective",
    "advantage",
    "aggregate",
    "call",
    "clip_scores",
    "correct",
    "denominators",
    "full_kl",
    "get_advantage",
    "get_policy_loss",
    "informative",
    "keep_finished",
    "kl",
    "kl_controller",
    "normalize_scores",
    "off_policy_diagnostics",
    "overlong_penalty",
    "policy_loss",
    "subtract_kl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

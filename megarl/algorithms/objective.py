"""What the actor minimises: policy loss, less the entropy bonus, plus the KL to the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

from megarl.algorithms.aggregation import AGGREGATIONS, Denominators, aggregate
from megarl.algorithms.divergence import KL_ESTIMATORS, kl
from megarl.algorithms.masking import as_mask, keep, log_ratio
from megarl.algorithms.policy_losses import PolicyLoss, get_policy_loss
from megarl.algorithms.registry import call


class ObjectiveResult(NamedTuple):
    """Of one piece (micro-batch and rank) of a mini-batch. `loss` and `sums` are divided by the global denominators
    already: add them over the pieces. Over `maxima`, take the maximum."""

    loss: Tensor  # scalar with gradient
    sums: dict[str, Tensor]  # scalars: pg_loss, kl_loss as in the loss; entropy, kl, ppo_kl, *_fraction by token
    maxima: dict[str, Tensor]  # scalars: ratio_max, abs_log_ratio_max (0 where nothing is unmasked)


@dataclass(frozen=True)
class Objective:
    """J = aggregate(policy loss) - entropy_coefficient * aggregate(entropy) + kl_coefficient * aggregate(KL).

    Fields are plain values under the names of the configuration's algorithm section; ValueError where one is not
    possible. Functions are looked up by name when called, so that an objective can be sent to other processes.
    """

    policy_loss: str = "vanilla"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0
    aggregation: str = "token_mean"
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"

    def __post_init__(self) -> None:
        get_policy_loss(self.policy_loss)
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"no aggregation {self.aggregation!r}; there are {', '.join(AGGREGATIONS)}")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"no KL estimator {self.kl_estimator!r}; there are {', '.join(KL_ESTIMATORS)}")
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low is {self.clip_low}; it must lie in 0..1")
        if self.clip_high < 0:
            raise ValueError(f"clip_high is {self.clip_high}; it must not be negative")
        if self.clip_dual is not None and self.clip_dual <= 1:
            raise ValueError(f"clip_dual is {self.clip_dual}; it must be above 1, or none")

    @classmethod
    def from_config(cls, algorithm: Any) -> Objective:
        """From any object that has this class's fields as attributes; what else it has is not looked at."""
        return cls(**{field.name: getattr(algorithm, field.name) for field in fields(cls)})

    def __call__(
        self, log_probs_BT: Tensor, entropy_BT: Tensor | None, data: Mapping[str, Tensor], denominators: Denominators
    ) -> ObjectiveResult:
        """log_probs_BT, entropy_BT: of the current policy, with gradient; entropy None where it is not wanted.
        data: (B, T) each: old_log_probs, advantages, loss_mask, and ref_log_probs where there is a reference.
        """
        mask_BT = as_mask(self._get(data, "loss_mask", log_probs_BT))
        old_log_probs_BT = self._get(data, "old_log_probs", log_probs_BT)
        policy = self._policy_loss(log_probs_BT, old_log_probs_BT, data, mask_BT)

        def share(values_BT: Tensor, mode: str = self.aggregation) -> Tensor:
            return aggregate(values_BT, mask_BT, mode) / denominators.of(mode)

        def by_token(values_BT: Tensor) -> Tensor:
            return share(values_BT.detach(), "token_mean")

        drift_BT = log_ratio(log_probs_BT.detach(), old_log_probs_BT, mask_BT)
        loss = share(policy.loss_BT)
        sums = {"pg_loss": loss, "clip_fraction": by_token(policy.clipped_BT), "ppo_kl": by_token(-drift_BT)}
        if policy.dual_clipped_BT is not None:
            sums["dual_clip_fraction"] = by_token(policy.dual_clipped_BT)
        if entropy_BT is not None:
            sums["entropy"] = by_token(entropy_BT)
        if self.entropy_coefficient:
            if entropy_BT is None:
                raise ValueError("the objective has an entropy coefficient, but was given no entropy")
            loss = loss - self.entropy_coefficient * share(entropy_BT)
        if self.kl_coefficient or "ref_log_probs" in data:
            ref_log_probs_BT = self._get(data, "ref_log_probs", log_probs_BT)
            kl_BT = kl(log_probs_BT, ref_log_probs_BT, mask_BT, self.kl_estimator)
            sums["kl_loss"], sums["kl"] = share(kl_BT), by_token(kl_BT)
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * sums["kl_loss"]
        maxima = {
            "ratio_max": _maximum(policy.ratio_BT, mask_BT),
            "abs_log_ratio_max": _maximum(drift_BT.abs(), mask_BT),
        }
        return ObjectiveResult(loss, {name: value.detach() for name, value in sums.items()}, maxima)

    def _policy_loss(
        self, log_probs_BT: Tensor, old_log_probs_BT: Tensor, data: Mapping[str, Tensor], mask_BT: Tensor
    ) -> PolicyLoss:
        # Masked here as well, for the sake of losses that users write: junk must not reach their gradients either.
        offered = {
            "log_probs_BT": keep(log_probs_BT, mask_BT),
            "old_log_probs_BT": keep(old_log_probs_BT, mask_BT),
            "advantages_BT": keep(self._get(data, "advantages", log_probs_BT), mask_BT),
            "mask_BT": mask_BT,
            "clip_low": self.clip_low,
            "clip_high": self.clip_high,
            "clip_dual": self.clip_dual,
        }
        function = get_policy_loss(self.policy_loss)
        try:
            result = call(function, offered)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RuntimeError(f"policy loss {self.policy_loss!r} failed: {reason}") from error
        if not isinstance(result, PolicyLoss):
            raise TypeError(f"policy loss {self.policy_loss!r} must return a PolicyLoss, not {type(result).__name__}")
        for name, values in result._asdict().items():
            if values is not None and values.shape != mask_BT.shape:  # it might broadcast to something, silently
                wanted = f"{tuple(mask_BT.shape)}, not {tuple(values.shape)}"
                raise ValueError(f"policy loss {self.policy_loss!r}: {name} must be of shape {wanted}")
        return result

    def _get(self, data: Mapping[str, Tensor], name: str, like_BT: Tensor) -> Tensor:
        if name not in data:
            raise ValueError(f"the objective needs {name!r}; it was given {', '.join(data) or 'nothing'}")
        if data[name].shape != like_BT.shape:  # broadcasting would make a wrong loss without a word
            raise ValueError(f"{name} is {tuple(data[name].shape)}, the log-probs are {tuple(like_BT.shape)}")
        return data[name]


def _maximum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    kept_BT = keep(values_BT.detach(), mask_BT)
    return kept_BT.amax() if kept_BT.numel() else kept_BT.new_zeros(())

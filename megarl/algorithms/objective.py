"""What the actor minimises: policy loss, less the entropy bonus, plus the KL to the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.aggregation import Denominators, aggregate, check_counted, check_mode
from megarl.algorithms.bits import BitMask
from megarl.algorithms.checks import check_number
from megarl.algorithms.divergence import EXACT_KL, check_estimator, kl
from megarl.algorithms.masking import as_mask
from megarl.algorithms.policy_losses import PolicyLoss, policy_loss
from megarl.algorithms.policy_losses.base import clamped_log_ratio
from megarl.algorithms.registry import call


class ObjectiveResult(NamedTuple):
    """Of one piece (micro-batch and rank) of a mini-batch. `loss` and `sums` are divided by the global denominators
    already: add them over the pieces. Over `maxima`, take the maximum."""

    loss: Tensor  # scalar with gradient
    sums: dict[str, Tensor]  # scalars: pg_loss, kl_loss as in the loss; entropy, kl, ppo_kl, *_fraction by token
    maxima: dict[str, Tensor]  # scalars: ratio_max, abs_log_ratio_max (0 where nothing is unmasked)


@dataclass(frozen=True)
class Objective:
    """J = aggregate(weight * policy loss) - entropy_coefficient * aggregate(entropy) + kl_coefficient * aggregate(KL).

    Fields are plain values under the names of the configuration's algorithm section; ValueError where one is not
    possible. Functions are looked up by name when called, so that an objective can be sent to other processes.
    """

    policy_loss: str = "vanilla"
    policy_loss_options: dict[str, Any] = field(default_factory=dict, hash=False)  # keywords of this loss alone
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0
    aggregation: str | None = None  # None: the loss's own
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"

    def __post_init__(self) -> None:
        if not isinstance(self.policy_loss_options, Mapping):
            raise ValueError(f"policy_loss_options is {self.policy_loss_options!r}; it must hold values by name")
        policy_loss.check_options(self.policy_loss, self.policy_loss_options)
        check_mode(self.mode)
        if self.kl_estimator not in EXACT_KL:
            check_estimator(self.kl_estimator)
        check_number("clip_low", self.clip_low, least=0, most=1)
        check_number("clip_high", self.clip_high, least=0)
        check_number("clip_dual", self.clip_dual, above=1, none=True)
        check_number("entropy_coefficient", self.entropy_coefficient, least=0)
        check_number("kl_coefficient", self.kl_coefficient, least=0)

    @classmethod
    def from_config(cls, algorithm: Any) -> Objective:
        """From any object with this class's fields as attributes: one that it lacks keeps its default, what else it has
        is not looked at."""
        names = [f.name for f in fields(cls) if hasattr(algorithm, f.name)]
        values = {name: getattr(algorithm, name) for name in names}
        return cls(**values | {"policy_loss_options": dict(values.get("policy_loss_options") or {})})

    @property
    def mode(self) -> str:
        """How losses are aggregated."""
        return policy_loss.traits(self.policy_loss).aggregation if self.aggregation is None else self.aggregation

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the (B, T) data that it cannot be called without (of the reference's for an exact KL: (B, T, ...))."""
        names = ["old_log_probs", "advantages", "loss_mask", *self._made]
        if "behaviour_log_probs_BT" in policy_loss.required(self.policy_loss):
            names.append("rollout_log_probs")
        of_reference = EXACT_KL.get(self.kl_estimator, ("ref_log_probs",)) if self.kl_coefficient else ()
        return (*names, *of_reference)

    @property
    def exact_kl(self) -> str | None:
        """`full` or `top_k` where the loss has a KL that is not estimated from the sampled tokens: whoever calls gives
        `exact_kl` among the data, made of those of `needs` that are the reference's."""
        return self.kl_estimator if self.kl_coefficient and self.kl_estimator in EXACT_KL else None

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all data that it would look at."""
        return tuple(dict.fromkeys((*self.needs, "rollout_log_probs", "ref_log_probs", "correction_weights")))

    @property
    def prepares(self) -> bool:
        """Whether `prepare` has anything to make."""
        return policy_loss.traits(self.policy_loss).prepare is not None

    def prepare(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the loss must know of the WHOLE mini-batch: run once before it is cut, and put into the data of each piece.

        data: (B, T) each: old_log_probs, advantages, loss_mask. Gives {name: (B, T)}; {} for most losses.
        """
        traits = policy_loss.traits(self.policy_loss)
        if traits.prepare is None:
            return {}
        mask = BitMask(field_of(data, "loss_mask"))
        mask_BT = mask.bool_BT
        given = {f"{name}_BT": field_of(data, name, mask_BT) for name in ("old_log_probs", "advantages")}
        offered = given | {"mask_BT": mask_BT}
        if not traits.masked:
            offered = {k: mask(v) for k, v in given.items()} | {"mask_BT": mask_BT.clone()}
        with torch.no_grad():
            made = self._call(traits.prepare, offered)
        for name in traits.makes:
            values = made.get(name) if isinstance(made, Mapping) else None
            if not isinstance(values, Tensor) or values.shape != mask_BT.shape:
                raise ValueError(
                    f"policy loss {self.policy_loss!r}: prepare must make {name} of {tuple(mask_BT.shape)}"
                )
        return {_field(name): made[name] for name in traits.makes}

    def __call__(
        self, log_probs_BT: Tensor, entropy_BT: Tensor | None, data: Mapping[str, Tensor], denominators: Denominators
    ) -> ObjectiveResult:
        """log_probs_BT, entropy_BT: of the current policy, with gradient; entropy None where it is not wanted.
        data: (B, T) each: old_log_probs, advantages, loss_mask; ref_log_probs where there is a reference; what `prepare`
        made; rollout_log_probs where the loss looks at them; exact_kl, with gradient, where `exact_kl` says so;
        correction_weights (no gradient) multiply the policy loss.
        """
        mask = BitMask(field_of(data, "loss_mask", log_probs_BT))
        if entropy_BT is not None:
            field_of({"entropy": entropy_BT}, "entropy", log_probs_BT)
        check_counted(denominators, mask.bool_BT)
        policy = self._policy_loss(log_probs_BT, entropy_BT, data, mask)

        def share(values_BT: Tensor, mode: str = self.mode) -> Tensor:
            """Of values that are 0 where masked."""
            return aggregate(values_BT, mask.bool_BT, mode, masked=True) / denominators.of(mode)

        def fraction(chosen_BT: Tensor | None) -> Tensor:
            if chosen_BT is None:
                return torch.zeros((), device=log_probs_BT.device)
            return (as_mask(chosen_BT) & mask.bool_BT).count_nonzero() / denominators.of("token_mean")

        loss_BT = policy.loss_BT
        if "correction_weights" in data:
            loss_BT = loss_BT * mask(field_of(data, "correction_weights", log_probs_BT).detach())
        drift_BT = policy.log_ratio_BT
        if drift_BT is None:
            drift_BT, _ = clamped_log_ratio(log_probs_BT, field_of(data, "old_log_probs", log_probs_BT), mask)
        loss = share(loss_BT)
        sums = {"pg_loss": loss, "clip_fraction": fraction(policy.clipped_BT), "ppo_kl": -share(drift_BT, "token_mean")}
        if policy.dual_clipped_BT is not None:
            sums["dual_clip_fraction"] = fraction(policy.dual_clipped_BT)
        if entropy_BT is not None:
            entropy_BT = mask(entropy_BT)
            sums["entropy"] = share(entropy_BT.detach(), "token_mean")
        if self.entropy_coefficient:
            if entropy_BT is None:
                raise ValueError("the objective has an entropy coefficient, but was given no entropy")
            loss = loss - self.entropy_coefficient * share(entropy_BT)
        kl_BT = self._kl(log_probs_BT, data, mask)
        if kl_BT is not None:
            sums["kl_loss"], sums["kl"] = share(kl_BT), share(kl_BT.detach(), "token_mean")
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * sums["kl_loss"]
        maxima = {"ratio_max": _ratio_max(policy.ratio_BT, drift_BT, mask), "abs_log_ratio_max": maximum(drift_BT)}
        return ObjectiveResult(loss, {name: value.detach() for name, value in sums.items()}, maxima)

    def _kl(self, log_probs_BT: Tensor, data: Mapping[str, Tensor], mask: BitMask) -> Tensor | None:
        """Of each token, 0 where masked; None where there is nothing to compare with."""
        if self.exact_kl:
            return mask(field_of(data, "exact_kl", log_probs_BT))
        if self.kl_estimator in EXACT_KL or not (self.kl_coefficient or "ref_log_probs" in data):
            return None
        return kl(log_probs_BT, field_of(data, "ref_log_probs", log_probs_BT), mask.bool_BT, self.kl_estimator)

    @property
    def _made(self) -> tuple[str, ...]:
        return tuple(_field(name) for name in policy_loss.traits(self.policy_loss).makes)

    def _policy_loss(
        self, log_probs_BT: Tensor, entropy_BT: Tensor | None, data: Mapping[str, Tensor], mask: BitMask
    ) -> PolicyLoss:
        given = {"log_probs_BT": log_probs_BT} | ({} if entropy_BT is None else {"entropy_BT": entropy_BT})
        given["old_log_probs_BT"] = field_of(data, "old_log_probs", log_probs_BT)
        given["advantages_BT"] = field_of(data, "advantages", log_probs_BT)
        if "rollout_log_probs" in self.needs or "rollout_log_probs" in data:
            given["behaviour_log_probs_BT"] = field_of(data, "rollout_log_probs", log_probs_BT)
        masked = policy_loss.traits(self.policy_loss).masked
        if not masked:  # for the sake of losses that users write: junk must not reach their values and gradients either
            given = {name: mask(values_BT) for name, values_BT in given.items()}
        rest = {f"{name}_BT": field_of(data, name, log_probs_BT) for name in self._made} | {"mask_BT": mask.bool_BT}
        if not masked:  # what it does to them must not reach the metrics, nor the next update
            rest = {name: values_BT.clone() for name, values_BT in rest.items()}
        result = self._call(policy_loss.get(self.policy_loss), given | rest)
        self._check_result(result, log_probs_BT)
        if masked:
            return result
        return result._replace(loss_BT=mask(result.loss_BT), log_ratio_BT=None)

    def _check_result(self, result: Any, log_probs_BT: Tensor) -> None:
        """TypeError or ValueError that names the loss and the field: what is wrong would show far from here, or not at all."""
        what = f"policy loss {self.policy_loss!r}"
        if not isinstance(result, PolicyLoss):
            raise TypeError(f"{what} must return a PolicyLoss, not {type(result).__name__}")
        for name, values in result._asdict().items():
            if values is None and name != "loss_BT":
                continue
            if not isinstance(values, Tensor):
                raise TypeError(f"{what}: {name} must be a tensor, not {type(values).__name__}")
            if values.shape != log_probs_BT.shape:  # it might broadcast to something, silently
                wanted = f"{tuple(log_probs_BT.shape)}, not {tuple(values.shape)}"
                raise ValueError(f"{what}: {name} must be of shape {wanted}")
        if log_probs_BT.requires_grad and torch.is_grad_enabled() and not result.loss_BT.requires_grad:
            raise ValueError(
                f"{what}: loss_BT has no gradient; it must be computed from log_probs_BT without detaching it"
            )

    def _call(self, function: Any, offered: Mapping[str, Any]) -> Any:
        """With the settings and those of the options that it takes: a loss and its `prepare` may share them out."""
        settings = {"clip_low": self.clip_low, "clip_high": self.clip_high, "clip_dual": self.clip_dual}
        try:
            return call(function, {**settings, **self.policy_loss_options, **offered})
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RuntimeError(f"policy loss {self.policy_loss!r} failed: {reason}") from error


def _field(argument: str) -> str:
    """selected_BT, an argument, is `selected` in the data."""
    return argument.removesuffix("_BT")


def field_of(data: Mapping[str, Tensor], name: str, like_BT: Tensor | None = None) -> Tensor:
    """This field of the data, of the shape that `like` has. ValueError names it where it is not there, or not so."""
    if name not in data:
        raise ValueError(f"the objective needs {name!r}; it was given {', '.join(data) or 'nothing'}")
    if like_BT is not None and data[name].shape != like_BT.shape:  # broadcasting would make a wrong loss without a word
        raise ValueError(
            f"{name} is {tuple(data[name].shape)}; as the model's output it must be {tuple(like_BT.shape)}"
        )
    return data[name]


def maximum(values_BT: Tensor) -> Tensor:
    """The largest absolute value, of values that are 0 where masked; 0 of none."""
    if not values_BT.numel():
        return values_BT.new_zeros(())
    least, most = values_BT.aminmax()  # half the work of abs().amax()
    return torch.maximum(most, -least)


def _ratio_max(ratio_BT: Tensor | None, drift_BT: Tensor, mask: BitMask) -> Tensor:
    """Of the loss's own ratio; where it has none, of pi / pi_old. 0 of none."""
    if ratio_BT is not None:
        return maximum(mask(ratio_BT.detach()))
    if not drift_BT.numel():
        return drift_BT.new_zeros(())
    return torch.where(mask.bool_BT, drift_BT, -torch.inf).amax().exp()

"""What a policy loss is, and the registry of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.masking import LOG_RATIO_LIMIT, keep, working
from megarl.algorithms.registry import Registry


class PolicyLoss(NamedTuple):
    """(B, T) each; what masked places hold does not matter to anyone."""

    loss_BT: Tensor  # with gradient
    ratio_BT: Tensor  # the ratio that the loss works with: pi / pi_old of the token, or of its sequence
    clipped_BT: Tensor | None = None  # bool: the clip decided, so the token has no gradient; None: nothing is clipped
    dual_clipped_BT: Tensor | None = None  # bool: the dual clip decided


PolicyLossFunction = Callable[..., PolicyLoss]
PrepareFunction = Callable[..., dict[str, Tensor]]


class Traits(NamedTuple):
    """What is known of a loss beside its formula."""

    aggregation: str = "token_mean"  # where the configuration leaves it to the loss
    prepare: PrepareFunction | None = None  # run once on the whole mini-batch, before it is cut
    makes: tuple[str, ...] = ()  # names of the (B, T) tensors that `prepare` gives, arguments of the loss


class PolicyLosses(Registry[PolicyLossFunction]):
    """`@policy_loss("name", aggregation=..., prepare=..., makes=(...))`.

    prepare(old_log_probs_BT, advantages_BT, mask_BT, **settings and options that it takes) -> {name: (B, T)}: statistics
    of the whole mini-batch, for a loss that cannot be told from one piece of it (a quantile, the largest k). It must
    not depend on the order of samples or on padding. The loss takes what it makes by name.
    """

    def __init__(self) -> None:
        super().__init__(
            "policy loss",
            inputs=(
                "log_probs_BT",
                "old_log_probs_BT",
                "advantages_BT",
                "mask_BT",
                "behaviour_log_probs_BT",
                "entropy_BT",
            ),
            settings=("clip_low", "clip_high", "clip_dual"),
        )
        self._traits: dict[PolicyLossFunction, Traits] = {}

    def __call__(
        self,
        name: str,
        *,
        aggregation: str = "token_mean",
        prepare: PrepareFunction | None = None,
        makes: Sequence[str] = (),
    ) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
        if bool(makes) != (prepare is not None):
            raise ValueError(f"policy loss {name!r}: `prepare` and the names that it `makes` belong together")
        self.inputs = tuple(dict.fromkeys((*self.inputs, *makes)))
        register = super().__call__(name)

        def with_traits(function: PolicyLossFunction) -> PolicyLossFunction:
            self._traits[register(function)] = Traits(aggregation, prepare, tuple(makes))
            return function

        return with_traits

    def traits(self, name: str) -> Traits:
        """Of the loss of this name or dotted path. A function that was not registered has the default ones."""
        return self._traits.get(self.get(name), Traits())

    def options(self, name: str) -> tuple[str, ...]:
        """Keywords of the loss, or of its `prepare`, that are not inputs."""
        own, prepare = super().options(name), self.traits(name).prepare
        if prepare is None:
            return own
        more = inspect.signature(prepare).parameters
        return tuple(dict.fromkeys((*own, *(keyword for keyword in more if keyword not in self.inputs))))


policy_loss = PolicyLosses()


def get_policy_loss(name: str) -> PolicyLossFunction:
    """The loss of this name, or the user's at "package.module.function". ValueError where there is none, or where it
    asks for what the trainer does not have."""
    return policy_loss.get(name)


def clamped_log_ratio(log_probs_BT: Tensor, old_log_probs_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(log(pi / pi_old) within ±20, 0 where masked; bool: unmasked and within). Without gradient: for losses whose
    gradient is that of log pi times a weight, which is 0 beyond the limit."""
    with torch.no_grad():
        difference_BT = keep(working(log_probs_BT) - working(old_log_probs_BT), mask_BT)
        # Not "below the limit": an unmasked NaN is somebody's bug and must not vanish here.
        inside_BT = mask_BT & ~(difference_BT.abs() >= LOG_RATIO_LIMIT)
        return difference_BT.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), inside_BT


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) mean over unmasked tokens of values that are 0 where masked; 0 of a sequence that has none."""
    return values_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)

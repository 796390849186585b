"""What a policy loss is, and the registry of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.bits import BitMask
from megarl.algorithms.masking import LOG_RATIO_LIMIT, working
from megarl.algorithms.registry import Registry

POSSIBLE = -104.0  # exp of less is 0 in float32: the log of such a probability counts as this


class PolicyLoss(NamedTuple):
    """(B, T) each; what masked places hold does not matter to anyone."""

    loss_BT: Tensor  # with gradient
    ratio_BT: Tensor | None = None  # that the loss works with: pi / pi_old of the token or its sequence; None: no ratio
    clipped_BT: Tensor | None = None  # bool: the clip decided, so the token has no gradient; None: nothing is clipped
    dual_clipped_BT: Tensor | None = None  # bool: the dual clip decided
    log_ratio_BT: Tensor | None = None  # log(pi / pi_old) within ±20, 0 where masked: spares others making it again


PolicyLossFunction = Callable[..., PolicyLoss]
PrepareFunction = Callable[..., dict[str, Tensor]]


class Traits(NamedTuple):
    """What is known of a loss beside its formula."""

    aggregation: str = "token_mean"  # where the configuration leaves it to the loss
    prepare: PrepareFunction | None = None  # run once on the whole mini-batch, before it is cut
    makes: tuple[str, ...] = ()  # names of the (B, T) tensors that `prepare` gives, arguments of the loss
    masked: bool = False  # masks its inputs itself, and its loss is 0 where masked: others need not do it again


class PolicyLosses(Registry[PolicyLossFunction]):
    """`@policy_loss("name", aggregation=..., prepare=..., makes=(...), masked=...)`: see `Traits`.

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
        masked: bool = False,
    ) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
        if bool(makes) != (prepare is not None):
            raise ValueError(f"policy loss {name!r}: `prepare` and the names that it `makes` belong together")
        self.inputs = tuple(dict.fromkeys((*self.inputs, *makes)))
        register = super().__call__(name)

        def with_traits(function: PolicyLossFunction) -> PolicyLossFunction:
            self._traits[register(function)] = Traits(aggregation, prepare, tuple(makes), masked)
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


def clamped_log_ratio(log_probs_BT: Tensor, old_log_probs_BT: Tensor, mask: BitMask) -> tuple[Tensor, Tensor]:
    """(log(pi / pi_old) within ±20, 0 where masked; 1.0 where that is within, 0.0 where the limit decided), no gradient."""
    with torch.no_grad():
        difference_BT = mask.keep_(working(log_probs_BT) - working(old_log_probs_BT))
        log_ratio_BT = difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return log_ratio_BT, difference_BT.eq_(log_ratio_BT)


def with_slope(log_probs_BT: Tensor, values_BT: Tensor, slope_BT: Tensor) -> Tensor:
    """These values, as a function of the log-probs whose derivative is this slope.

    A loss that says its own derivative needs one product in the backward pass, and keeps one tensor for it.
    """
    function_BT: Tensor = _WithSlope.apply(log_probs_BT, values_BT, slope_BT)
    return function_BT


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_probs_BT: Tensor, values_BT: Tensor, slope_BT: Tensor) -> Tensor:
        ctx.save_for_backward(slope_BT)
        ctx.dtype = log_probs_BT.dtype
        return values_BT.view_as(values_BT)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return (grad_outputs[0] * ctx.saved_tensors[0]).to(ctx.dtype), None, None


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) mean over unmasked tokens of values that are 0 where masked; 0 of a sequence that has none."""
    return values_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)

"""What a policy loss is, and the registry of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.bits import BitMask
from megarl.algorithms.checks import check_shapes
from megarl.algorithms.masking import LOG_RATIO_LIMIT, working
from megarl.algorithms.registry import Registry, call

POSSIBLE = -104.0  # exp of less is 0 in float32: the log of such a probability counts as this


_GIVEN = ("log_probs_BT", "old_log_probs_BT", "advantages_BT", "mask_BT", "behaviour_log_probs_BT", "entropy_BT")


class PolicyLoss(NamedTuple):
    """(B, T) each; what masked places hold does not matter to anyone."""

    loss_BT: Tensor  # with gradient
    ratio_BT: Tensor | None = None  # that the loss works with: pi / pi_old of the token or its sequence; None: no ratio
    clipped_BT: Tensor | None = None  # bool: the clip decided, so the token has no gradient; None: nothing is clipped
    dual_clipped_BT: Tensor | None = None  # bool: the dual clip decided
    log_ratio_BT: Tensor | None = None  # log(pi / pi_old) within ±20, 0 where masked: spares others making it again


PolicyLossFunction = Callable[..., PolicyLoss]
PrepareFunction = Callable[..., dict[str, Tensor]]
CheckFunction = Callable[..., None]


class Traits(NamedTuple):
    """What is known of a loss beside its formula."""

    aggregation: str = "token_mean"  # where the configuration leaves it to the loss
    prepare: PrepareFunction | None = None  # run once on the whole mini-batch, before it is cut
    makes: tuple[str, ...] = ()  # names of the (B, T) tensors that `prepare` gives, arguments of the loss
    masked: bool = False  # masks its inputs itself, and its loss is 0 where masked: others need not do it again
    check: CheckFunction | None = None  # takes options by name; ValueError where one is not possible


class PolicyLosses(Registry[PolicyLossFunction]):
    """`@policy_loss("name", aggregation=..., prepare=..., makes=(...), masked=..., check=...)`: see `Traits`.

    prepare(old_log_probs_BT, advantages_BT, mask_BT, **settings and options that it takes) -> {name: (B, T)}: statistics
    of the whole mini-batch, for a loss that cannot be told from one piece of it (a quantile, the largest k). It must
    not depend on the order of samples or on padding. The loss takes what it makes by name.
    A `masked` loss is given the batch itself and must leave it as it is; any other is given copies.
    """

    def __init__(self) -> None:
        super().__init__(
            "policy loss",
            inputs=_GIVEN,
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
        check: CheckFunction | None = None,
    ) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
        if bool(makes) != (prepare is not None):
            raise ValueError(f"policy loss {name!r}: `prepare` and the names that it `makes` belong together")
        self.inputs = tuple(dict.fromkeys((*self.inputs, *makes)))
        register = super().__call__(name)

        def with_traits(function: PolicyLossFunction) -> PolicyLossFunction:
            before = self._traits.get(function)
            self._traits[function] = Traits(aggregation, prepare, tuple(makes), masked, check)
            try:
                return register(function)
            except ValueError:
                self._traits.pop(function) if before is None else self._traits.update({function: before})
                raise

        return with_traits

    def get(self, name: str) -> PolicyLossFunction:
        if not isinstance(name, str) or name.startswith("."):
            raise ValueError(f"{self.kind} is {name!r}; it must be a name or a dotted path, package.module.function")
        return super().get(name)

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

    def check_options(self, name: str, options: Iterable[str]) -> None:
        """By name; where the options come with their values, these too. ValueError on one that is not possible, and on a
        setting: among the options it would hide the algorithm's own."""
        for setting in self.settings:
            if setting in options:
                raise ValueError(
                    f"{self.kind} {name!r}: {setting!r} is a setting of its own; write algorithm.{setting}"
                )
        super().check_options(name, options)
        traits = self.traits(name)
        if traits.check is None or not isinstance(options, Mapping):
            return
        functions = [self.get(name)] if traits.prepare is None else [traits.prepare, self.get(name)]
        known = {p.name: p.default for f in functions for p in inspect.signature(f).parameters.values()}
        try:
            call(traits.check, {**known, **options})
        except ValueError as error:
            raise ValueError(f"{self.kind} {name!r}: {error}") from error

    def _check(self, name: str, function: Any) -> None:
        super()._check(name, function)
        made = self._traits.get(function, Traits()).makes
        for parameter in inspect.signature(function).parameters.values():
            elsewhere = parameter.name in self.inputs and parameter.name not in (*_GIVEN, *made)
            if elsewhere and parameter.default is parameter.empty:
                raise ValueError(
                    f"{self.kind} {name!r} asks for {parameter.name!r}, which only the prepare of another loss makes; "
                    f"register it with a prepare that makes it"
                )


policy_loss = PolicyLosses()


def get_policy_loss(name: str) -> PolicyLossFunction:
    """The loss of this name, or the user's at "package.module.function". ValueError where there is none, or where it
    asks for what the trainer does not have."""
    return policy_loss.get(name)


def mask_of(mask_BT: Tensor, **tensors_BT: Tensor) -> BitMask:
    """The mask, for tensors of its shape; ValueError names one that has another."""
    check_shapes(mask_BT=mask_BT, **tensors_BT)
    return BitMask(mask_BT)


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

"""What the critic minimises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.aggregation import Denominators, aggregate, check_counted, check_mode
from megarl.algorithms.bits import keep
from megarl.algorithms.checks import check_number, check_shapes
from megarl.algorithms.masking import as_mask
from megarl.algorithms.objective import ObjectiveResult, field_of, maximum


class ValueLoss(NamedTuple):
    """(B, T) each, 0 where masked."""

    loss_BT: Tensor  # with gradient
    clipped_BT: Tensor  # bool: the clip decided, so the token has no gradient


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, *, clip: float | None = 0.2
) -> ValueLoss:
    """L = 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) (arXiv:1506.02438 for R, arXiv:2005.12729 for the clip).

    The worse of the two: a value that ran away from V_old in the right direction has no gradient, one that ran in the wrong
    direction has the whole. clip None: 1/2 (V - R)^2. Values alone have a gradient. ValueError on shapes that differ, and on
    a clip that is not above 0.
    """
    check_shapes(mask_BT=mask_BT, values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT)
    check_number("clip", clip, above=0, none=True)
    values_BT, returns_BT = keep(values_BT, mask_BT), keep(returns_BT.detach(), mask_BT)
    error_BT = values_BT - returns_BT
    if clip is None:
        return ValueLoss(error_BT.square() / 2, torch.zeros_like(as_mask(mask_BT)))
    with torch.no_grad():
        old_values_BT = keep(old_values_BT, mask_BT)
        held_BT = values_BT.clamp(old_values_BT - clip, old_values_BT + clip).sub_(returns_BT)
        clipped_BT = held_BT.abs() > error_BT.abs()
    return ValueLoss(torch.where(clipped_BT, held_BT, error_BT).square() / 2, clipped_BT)


@dataclass(frozen=True)
class ValueObjective:
    """aggregate(value loss), called by a critic's engine as `Objective` is by an actor's."""

    value_clip: float | None = 0.2  # how far a value may move from what it was in the rollout; None: any distance
    value_aggregation: str = "token_mean"

    def __post_init__(self) -> None:
        check_mode(self.value_aggregation)
        check_number("value_clip", self.value_clip, above=0, none=True)

    @classmethod
    def from_config(cls, section: Any) -> ValueObjective:
        """From any object with this class's fields as attributes; one that it lacks keeps its default."""
        return cls(**{f.name: getattr(section, f.name) for f in fields(cls) if hasattr(section, f.name)})

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the (B, T) data that it looks at."""
        return ("values", "returns", "loss_mask")

    reads = needs

    def __call__(self, values_BT: Tensor, data: Mapping[str, Tensor], denominators: Denominators) -> ObjectiveResult:
        """values_BT: of the critic in training, with gradient. data: (B, T) each: values (of the critic before this step's
        updates), returns, loss_mask.

        sums: value_loss as in the loss; value_clip_fraction, value_mean, value_error_square by token. maxima: value_error_max.
        """
        mask_BT = as_mask(field_of(data, "loss_mask", values_BT))
        check_counted(denominators, mask_BT)
        returns_BT = field_of(data, "returns", values_BT)
        result = value_loss(values_BT, field_of(data, "values", values_BT), returns_BT, mask_BT, clip=self.value_clip)
        loss = aggregate(result.loss_BT, mask_BT, self.value_aggregation) / denominators.of(self.value_aggregation)

        def by_token(x_BT: Tensor) -> Tensor:
            return aggregate(x_BT, mask_BT, "token_mean") / denominators.of("token_mean")

        now_BT = keep(values_BT.detach(), mask_BT)
        error_BT = now_BT - keep(returns_BT.detach(), mask_BT)
        sums = {
            "value_loss": loss.detach(),
            "value_clip_fraction": by_token(result.clipped_BT),
            "value_mean": by_token(now_BT),
            "value_error_square": by_token(error_BT.square()),
        }
        return ObjectiveResult(loss, sums, {"value_error_max": maximum(error_BT)})

"""Every estimator on every degenerate batch: finite, 0 where masked, exactly 0 where there is nothing to learn from.

A new estimator is in the table by itself. Each row of the table counts the broken promises of one estimator over all cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Advantage, advantage, call

INF, NAN = math.inf, math.nan
Record = Callable[[str, float, float], None]
every_estimator = pytest.mark.parametrize("name", advantage.names)
# They compare tokens of the whole batch, not samples of a group: scores that differ between groups are something to learn from.
OF_THE_BATCH = ("gae", "reinforce_plus_plus")


class Case(NamedTuple):
    reward: Tensor  # (B, T)
    mask: Tensor
    group: list[str]
    learn: str = "something"  # "nothing": every advantage is exactly 0; "within groups": of group-relative estimators


def rows(values: list[float], columns: int = 3) -> Tensor:
    """The value of each row at its last token, 0 before."""
    result = torch.zeros(len(values), columns)
    if columns:
        result[:, -1] = torch.tensor(values)
    return result


def case(reward: Tensor, group: str, mask: list[list[int]] | None = None, learn: str = "something") -> Case:
    return Case(reward, torch.ones(reward.shape) if mask is None else torch.tensor(mask).float(), list(group), learn)


def with_junk(junk: float) -> Case:
    """Masked at the end, in the middle, and over a whole row; junk in all of it."""
    plain = case(rows([1.0, 0.0, 0.0, 2.0], 4), "aabb", [[1, 1, 1, 1], [1, 0, 1, 1], [0] * 4, [1, 1, 1, 1]])
    return plain._replace(reward=torch.where(plain.mask == 0, junk, plain.reward))


CASES = {
    "an ordinary batch": case(rows([1.0, 0.0, 0.5, 2.0]), "aabb"),
    "a group of one": case(rows([1.0]), "a", learn="within groups"),
    "only groups of one": case(rows([1.0, 0.0, 3.0]), "abc", learn="within groups"),
    "a group of one among others": case(rows([1.0, 0.0, 3.0]), "aab"),
    "all rewards equal": case(rows([0.1] * 7), "aaaaaaa", learn="nothing"),
    "all rewards equal, lengths differ": case(
        rows([0.1] * 3), "aaa", [[1, 1, 1], [0, 1, 1], [0, 0, 1]], learn="nothing"
    ),
    "all rewards 0": case(rows([0.0] * 4), "abab", learn="nothing"),
    "equal within each group": case(rows([0.1, 0.7, 0.1, 0.7, 0.1, 0.7]), "ababab", learn="within groups"),
    "rewards that differ by rounding": case(rows([1.0, 1.0 + 2**-23, 1.0, 1.0]), "aaaa"),
    "huge rewards": case(rows([1e30, -1e30, 0.0, 1e30]), "aaaa"),
    "tiny rewards": case(rows([1e-30, 0.0, 0.0, 1e-30]), "aaaa"),
    "a row all masked": case(rows([1.0, 0.0, 5.0]), "aaa", [[1] * 3, [1] * 3, [0] * 3]),
    "a group all masked": case(rows([1.0, 0.0, 5.0]), "aab", [[1] * 3, [1] * 3, [0] * 3]),
    "everything masked": case(rows([1.0, 0.0, 5.0]), "aaa", [[0] * 3] * 3, learn="nothing"),
    "one token": case(rows([1.0, 0.0], 1), "aa"),
    "one token of one sample": case(rows([1.0], 1), "a", learn="within groups"),
    "one token of many": case(rows([1.0, 0.0, 5.0]), "aaa", [[0] * 3, [0, 1, 0], [0] * 3], learn="nothing"),
    "an empty batch": case(torch.zeros(0, 3), "", learn="nothing"),
    "no tokens": case(torch.zeros(2, 0), "aa", learn="nothing"),
    "NaN where masked": with_junk(NAN),
    "+inf where masked": with_junk(INF),
    "-inf where masked": with_junk(-INF),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"normalize_std": False, "gamma": 0.9, "lam": 0.9},
    {"gamma": 0.0, "lam": 0.0, "scale": "groups"},
    {"k": 1, "mean_level": "none", "std_level": "group"},
    {"mean_level": "batch", "std_level": "batch", "leave_one_out": True},
    {"mean_level": "group", "std_level": "none", "leave_one_out": True},
]


def offered(batch: Case) -> dict[str, Any]:
    """The critic knows nothing, the greedy answers' score is the samples' own, the tokens are certain in turns."""
    score = torch.where(batch.mask != 0, batch.reward, 0.0).sum(-1)
    log_probs = torch.zeros(batch.reward.shape)
    log_probs[:, ::2] = -1.0
    junk = torch.where(batch.mask != 0, 0.0, NAN)
    return {
        "reward_BT": batch.reward,
        "mask_BT": batch.mask,
        "group_B": batch.group,
        "values_BT": junk,
        "baseline_B": torch.where(batch.mask.bool().any(-1), score, NAN),
        "old_log_probs_BT": log_probs + junk,
        "entropy_BT": junk,
        "sum_p2_BT": log_probs.exp().square() + junk,
        "reward_parts_BK": torch.stack((score, 2 * score), -1),
    }


def broken(result: Advantage, batch: Case, nothing: bool) -> Iterator[str]:
    for values in result:
        if values.shape != batch.mask.shape or values.dtype != torch.float32:
            yield "shape"
        elif not values.isfinite().all():
            yield "not finite"
        elif values[batch.mask == 0].any():
            yield "not 0 where masked"
    if nothing and result.advantages_BT.any():
        yield "not 0 where there is nothing to learn"


@every_estimator
def test_every_degenerate_batch(name: str, record_invariant: Record) -> None:
    function, found = advantage.get(name), []
    options = [o for i, o in enumerate(OPTIONS) if not i or set(o) & set(advantage.options(name))]
    if "whiten" in advantage.options(name):
        options += [{"whiten": choice} for choice in (("token", "none") if name == "gdpo" else (False,))]
    for title, batch in CASES.items():
        for option in options:
            for singleton in ("zero", "score"):
                # A mean over nothing leaves the score itself, and a discount makes equal scores unequal from token to token.
                plain = option.get("mean_level", "group") == "group" and option.get("gamma", 1.0) == 1.0
                plain &= name not in OF_THE_BATCH or option.get("whiten") is not False
                # There a token can be alone that is not the first: where its trajectory is the longest.
                alone = name == "optimal_token_baseline" and singleton == "score"
                nothing = batch.learn == "nothing" and not alone
                nothing |= batch.learn == "within groups" and singleton == "zero" and name not in OF_THE_BATCH
                result = call(function, offered(batch) | option | {"singleton": singleton})
                found += [
                    f"{title}, {option}, {singleton}: {what}" for what in broken(result, batch, nothing and plain)
                ]
    print(*found, sep="\n")
    record_invariant(f"{name}: broken on {len(CASES)} degenerate batches x {2 * len(options)} settings", len(found), 0)


@every_estimator
@pytest.mark.parametrize("score", [NAN, INF, -INF])
def test_an_undefined_score_is_a_clear_error(name: str, score: float) -> None:
    batch = case(rows([1.0, score]), "ab")
    parts = torch.tensor([[1.0, 0.0], [0.0, score]])
    wanted = "the reward 1 of sample 1 is" if name == "gdpo" else "the score of sample 1 is"
    with pytest.raises(ValueError, match=f"{wanted} {score}"):
        call(advantage.get(name), offered(batch) | {"reward_parts_BK": parts})


@pytest.mark.parametrize(
    ("name", "field", "said"),
    [
        ("gae", "values_BT", "the sum of values_BT of sample 1 is nan"),
        ("optimal_token_baseline", "old_log_probs_BT", "group 'b': the noise .* of sample 1 is nan"),
        ("optimal_token_baseline", "sum_p2_BT", "group 'b': the noise .* of sample 1 is nan"),
        ("remax", "baseline_B", "the baseline_B of sample 1 is nan"),
    ],
)
def test_an_undefined_input_is_a_clear_error(name: str, field: str, said: str) -> None:
    inputs = offered(case(rows([1.0, 2.0]), "ab"))
    inputs[field] = inputs[field].clone()
    inputs[field][1] = NAN
    with pytest.raises(ValueError, match=said):
        call(advantage.get(name), inputs)

"""What must not change any registered estimator: order, padding, junk in masked places, precision, the groups' names."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from megarl.algorithms import Advantage, advantage, call

many = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 2**32 - 1)
every_estimator = pytest.mark.parametrize("name", advantage.names)
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "gae": [{"gamma": 0.5, "lam": 0.5}],
    "reinforce_plus_plus": [{"gamma": 0.5}],
    "grpo_passk": [{}, {"k": 2}],
    "gdpo": [{}, {"whiten": "token"}],
    "group_norm": [{}, {"mean_level": "batch", "std_level": "group", "leave_one_out": True}],
    "gpg": [{}, {"scale": "groups"}],
}
NAMES: list[Hashable] = ["a", 7, ("x", 1), "7", 3.5, None, frozenset({1})]


def random_case(seed: int) -> dict[str, Any]:
    """All that an estimator may ask for. Every group has two samples or more, so that pass@2 is defined.

    What is whitened is of quarters and halves of them, exact: whitening makes noise as large as it likes where all else is equal.
    """
    generator = np.random.default_rng(seed)
    rows, columns = int(generator.integers(2, 24)), int(generator.integers(1, 9))

    def quarters(*shape: int) -> Tensor:
        return torch.from_numpy(generator.integers(-3, 4, shape) / 4).float()

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(generator.normal(size=shape).astype(np.float32))

    mask = torch.from_numpy((generator.random((rows, columns)) < 0.7).astype(np.float32))
    mask[generator.random(rows) < 0.1] = 0
    return {
        "reward_BT": quarters(rows, columns),
        "mask_BT": mask,
        "group_B": [NAMES[i // 2 % 7] for i in generator.permutation(rows - rows % 2)] + [NAMES[0]] * (rows % 2),
        "values_BT": quarters(rows, columns),
        "baseline_B": normal(rows),
        "old_log_probs_BT": -normal(rows, columns).abs(),
        "entropy_BT": normal(rows, columns).abs(),
        "sum_p2_BT": normal(rows, columns).square(),
        "reward_parts_BK": quarters(rows, 2),
        "singleton": ["zero", "score"][seed % 2],
    }


def run(name: str, offered: dict[str, Any], seed: int, **changed: Any) -> Advantage:
    choices = SETTINGS.get(name, [{}])
    return call(advantage.get(name), offered | choices[seed // 2 % len(choices)] | changed)


def changed(offered: dict[str, Any], of_tokens: Any, of_samples: Any = lambda x: x) -> dict[str, Any]:
    """The (B, T) tensors by one function, what has one row a sample by another."""
    result = dict(offered)
    for name, value in offered.items():
        if name.endswith("_BT"):
            result[name] = of_tokens(value)
        elif name.endswith(("_B", "_BK")):
            result[name] = of_samples(value)
    return result


def close(one: Advantage, other: Advantage) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


@every_estimator
def test_the_order_of_samples_does_not_matter(name: str) -> None:
    @many
    @given(seeds)
    def check(seed: int) -> None:
        offered = random_case(seed)
        order = np.random.default_rng(seed).permutation(len(offered["group_B"])).tolist()
        shuffled = changed(
            offered,
            lambda x: x[order],
            lambda x: x[order] if isinstance(x, Tensor) else [x[i] for i in order],
        )
        plain = run(name, offered, seed)
        close(run(name, shuffled, seed), Advantage(*(x[order] for x in plain)))

    check()


@every_estimator
def test_padding_does_not_matter(name: str) -> None:
    @many
    @given(seeds, st.integers(1, 70))
    def check(seed: int, more: int) -> None:
        offered = random_case(seed)
        width = offered["mask_BT"].shape[1]
        padded = changed(offered, lambda x: pad(x, (0, more), value=math.nan))
        padded["mask_BT"] = pad(offered["mask_BT"], (0, more))
        result = run(name, padded, seed)
        assert not any(x[:, width:].any() for x in result)
        close(Advantage(*(x[:, :width] for x in result)), run(name, offered, seed))

    check()


@every_estimator
def test_junk_in_masked_places_changes_nothing(name: str) -> None:
    """Bit for bit, and in what masked rows bring along as well. And inputs are left as they were."""

    @many
    @given(seeds, st.sampled_from([math.nan, math.inf, -math.inf, 3e38]))
    def check(seed: int, junk: float) -> None:
        offered = random_case(seed)
        mask = offered["mask_BT"] != 0
        there = mask.any(-1)
        dirty = changed(
            offered,
            lambda x: torch.where(mask, x, junk),
            lambda x: torch.where(there if x.dim() == 1 else there[:, None], x, junk) if isinstance(x, Tensor) else x,
        )
        dirty["mask_BT"] = offered["mask_BT"]
        before = {key: x.clone() if isinstance(x, Tensor) else list(x) for key, x in dirty.items()}
        plain, result = run(name, offered, seed), run(name, dirty, seed)
        assert all(torch.equal(a, b) for a, b in zip(plain, result, strict=True))
        assert not any(x[~mask].any() for x in result)
        for key, x in before.items():
            after = dirty[key]
            assert torch.equal(x.nan_to_num(), after.nan_to_num()) if isinstance(x, Tensor) else x == list(after)

    check()


@every_estimator
def test_names_of_groups_and_kinds_of_masks_do_not_matter(name: str) -> None:
    @many
    @given(seeds)
    def check(seed: int) -> None:
        offered = random_case(seed)
        numbers = {group: i for i, group in enumerate(dict.fromkeys(offered["group_B"]))}
        as_ints = torch.tensor([numbers[group] for group in offered["group_B"]])
        mask = offered["mask_BT"]
        plain = run(name, offered, seed)
        other = [as_ints, as_ints.numpy(), as_ints.numpy().astype(str), tuple(offered["group_B"])]
        masks = [mask.bool(), mask.to(torch.uint8), mask.long() * 3, mask.T.contiguous().T]
        for group, as_mask in zip(other, masks, strict=True):
            close(run(name, offered, seed, group_B=group, mask_BT=as_mask), plain)

    check()


@every_estimator
def test_precision_of_the_input(name: str) -> None:
    """float32 statistics from half precision; what half precision holds exactly gives the very same result. float64 stays."""

    @many
    @given(seeds, st.sampled_from([torch.bfloat16, torch.float16, torch.float64]))
    def check(seed: int, dtype: torch.dtype) -> None:
        offered = random_case(seed)
        for key in ("reward_BT", "values_BT", "baseline_B", "old_log_probs_BT", "sum_p2_BT", "reward_parts_BK"):
            offered[key] = offered[key].bfloat16().half().float()  # exact in all of them
        other = changed(offered, lambda x: x.to(dtype), lambda x: x.to(dtype) if isinstance(x, Tensor) else x)
        plain, result = run(name, offered, seed), run(name, other, seed)
        for a, b in zip(plain, result, strict=True):
            assert a.dtype == torch.float32
            if dtype == torch.float64:
                torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=2e-5)
                assert b.dtype == torch.float64
            else:
                assert torch.equal(a, b) and b.dtype == torch.float32

    check()


@every_estimator
def test_the_same_every_time_and_without_a_graph(name: str) -> None:
    offered = random_case(4)
    offered["values_BT"].requires_grad_()
    first, second = run(name, offered, 0), run(name, offered, 0)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(first, second, strict=True))

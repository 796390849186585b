"""What a policy loss, its options and what it returns must be: one sentence that names what is not so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Denominators, Objective, PolicyLoss, aggregate, call, denominators, kl
from megarl.algorithms.policy_losses import get_policy_loss, policy_loss
from megarl.algorithms.value_loss import ValueObjective, value_loss

NAN, INF = math.nan, math.inf
DATA = ("log_probs_BT", "old_log_probs_BT", "advantages_BT", "behaviour_log_probs_BT", "selected_BT")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Registers a loss for as long as the test runs."""
    for attribute in ("_functions", "_traits"):
        monkeypatch.setattr(policy_loss, attribute, dict(getattr(policy_loss, attribute)))
    monkeypatch.setattr(policy_loss, "inputs", policy_loss.inputs)

    def register(function: Callable[..., Any], **traits: Any) -> str:
        policy_loss("own", **traits)(function)
        return "own"

    return register


def small(**more: Tensor) -> dict[str, Tensor]:
    names = ("old_log_probs", "advantages", "loss_mask", "rollout_log_probs")
    return {name: torch.ones(2, 2) for name in names} | more


# --- options ---------------------------------------------------------------------------------------------------------------------

WRONG = {
    "clip_cov": [
        *(("cov_ratio", value) for value in ("abc", -1, 0, 2, None, NAN, True)),
        *(("cov_low", value) for value in ("1", NAN, None, 9)),
        *(("cov_high", value) for value in ("x", INF, 1.0)),
    ],
    "kl_cov": [("cov_ratio", 0.0), *(("kl_weight", value) for value in ("abc", -1, NAN, INF, None))],
    "dro": [("beta", value) for value in (-1, 0, NAN, INF, "x", None, False)],
    "sapo": [(f"tau_{side}", value) for side in ("positive", "negative") for value in (0, -1, NAN, INF, "1", None)],
    "dppo_tv": [("truncate", value) for value in (-1, 0, NAN, INF, "20", None)],
    "dppo_kl": [("truncate", value) for value in (-1, 0, NAN, INF, "20", None)],
    "decoupled": [("behaviour_cap", value) for value in (-1, 0, NAN, INF, "2")],
}
SETTINGS = {"clip_low", "clip_high", "clip_dual"}


def test_every_option_of_every_loss_is_held_against_its_range() -> None:
    for name in policy_loss.names:
        assert {option for option, _ in WRONG.get(name, [])} == set(policy_loss.options(name)) - SETTINGS, name


@pytest.mark.parametrize(("name", "option", "value"), [(n, *pair) for n, pairs in WRONG.items() for pair in pairs])
def test_an_option_that_is_not_possible_is_refused_at_the_start_and_by_the_loss(
    name: str, option: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=rf"policy loss '{name}': .*{option} is {value!r}"):
        Objective(name, {option: value})
    traits, ones = policy_loss.traits(name), torch.ones(2, 2)
    functions = [get_policy_loss(name), *([traits.prepare] if traits.prepare else [])]
    takers = [f for f in functions if option in f.__code__.co_varnames or hasattr(f, "__wrapped__")]
    with pytest.raises(ValueError, match=rf"{option} is {value!r}"):
        for function in takers:
            call(function, dict.fromkeys((*DATA, "mask_BT"), ones) | {option: value})


def test_options_that_are_possible_are_taken() -> None:
    assert Objective("decoupled", {"behaviour_cap": None}) and Objective("decoupled", {"behaviour_cap": 2})
    assert Objective("kl_cov", {"kl_weight": 0}) and Objective("clip_cov", {"cov_low": -2, "cov_high": 0.5})
    assert Objective("clip_cov", {"cov_ratio": 1})


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_a_setting_is_no_option(setting: str) -> None:
    """As an option it would hide algorithm.clip_*, whatever its range."""
    said = f"policy loss 'vanilla': '{setting}' is a setting of its own; write algorithm.{setting}"
    for refuse in (
        lambda: Objective(policy_loss_options={setting: 5}),
        lambda: policy_loss.check_options("vanilla", [setting]),
    ):
        with pytest.raises(ValueError, match=said):
            refuse()


def test_a_users_loss_checks_its_own_options(registered: Callable[..., str]) -> None:
    def check(width: float) -> None:
        if width <= 0:
            raise ValueError(f"width is {width}; it must be above 0")

    def loss(log_probs_BT: Tensor, *, width: float = 1.0) -> PolicyLoss:
        return PolicyLoss(log_probs_BT / width)

    name = registered(loss, check=check)
    assert Objective(name) and Objective(name, {"width": 2.0})
    with pytest.raises(ValueError, match="policy loss 'own': width is -1; it must be above 0"):
        Objective(name, {"width": -1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({"clip_low": x}, "clip_low is") for x in (NAN, -0.1, "a", None, True)),
        *(({"clip_high": x}, "clip_high is") for x in (NAN, INF, "a", None)),
        *(({"clip_dual": x}, "clip_dual is") for x in (NAN, INF, "a", 1)),
        *(({"entropy_coefficient": x}, "entropy_coefficient is") for x in (-1, NAN, INF, "x", None)),
        *(({"kl_coefficient": x}, "kl_coefficient is") for x in (-1, NAN, INF, "x", None)),
        ({"aggregation": ""}, "no aggregation ''"),
        ({"kl_estimator": None}, "no KL estimator None"),
        *(
            ({"policy_loss": x}, "policy loss is .*; it must be a name or a dotted path")
            for x in (None, 3, "..x", ".x")
        ),
        *(
            ({"policy_loss_options": x}, "policy_loss_options is .*; it must hold values by name")
            for x in (None, 3, ["beta"])
        ),
    ],
)
def test_an_objective_that_is_not_possible(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**values)


@pytest.mark.parametrize("value", [NAN, INF, "a", -1])
def test_a_value_objective_that_is_not_possible(value: Any) -> None:
    with pytest.raises(ValueError, match="value_clip is"):
        ValueObjective(value_clip=value)
    with pytest.raises(ValueError, match="clip is"):
        value_loss(*[torch.ones(1, 1)] * 4, clip=value)


# --- what is asked for, and what comes back ---------------------------------------------------------------------------------------


def test_what_another_loss_prepares_is_not_offered(registered: Callable[..., str]) -> None:
    def asks(log_probs_BT: Tensor, selected_BT: Tensor) -> PolicyLoss:
        return PolicyLoss(log_probs_BT * selected_BT)

    def prepare(mask_BT: Tensor) -> dict[str, Tensor]:
        return {"selected_BT": mask_BT}

    with pytest.raises(ValueError, match="asks for 'selected_BT', which only the prepare of another loss makes"):
        registered(asks)
    assert "own" not in policy_loss.names and asks not in policy_loss._traits
    name = registered(asks, prepare=prepare, makes=("selected_BT",))
    data = small()
    assert Objective(name)(
        data["advantages"], None, data | Objective(name).prepare(data), denominators(torch.ones(2, 2))
    )


@pytest.mark.parametrize(
    ("returned", "error", "said"),
    [
        (lambda x: [x], TypeError, "must return a PolicyLoss, not list"),
        (lambda x: PolicyLoss([1.0, 2.0]), TypeError, "loss_BT must be a tensor, not list"),
        (lambda x: PolicyLoss(None), TypeError, "loss_BT must be a tensor, not NoneType"),
        (lambda x: PolicyLoss(x, clipped_BT=3), TypeError, "clipped_BT must be a tensor, not int"),
        (lambda x: PolicyLoss(x, x[0]), ValueError, r"ratio_BT must be of shape \(2, 2\), not \(2,\)"),
        (
            lambda x: PolicyLoss(x.detach()),
            ValueError,
            "loss_BT has no gradient; it must be computed from log_probs_BT",
        ),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_what_a_loss_returns(
    registered: Callable[..., str], masked: bool, returned: Callable[[Tensor], Any], error: type[Exception], said: str
) -> None:
    def loss(log_probs_BT: Tensor) -> Any:
        return returned(log_probs_BT)

    objective = Objective(registered(loss, masked=masked))
    log_probs = torch.zeros(2, 2, requires_grad=True)
    with pytest.raises(error, match=f"policy loss 'own':? {said}"):
        objective(log_probs, None, small(), denominators(torch.ones(2, 2)))


@pytest.mark.parametrize("made", [None, [], {}, {"x_BT": 1}, {"x_BT": torch.ones(2)}])
def test_what_prepare_makes(registered: Callable[..., str], made: Any) -> None:
    def loss(log_probs_BT: Tensor, x_BT: Tensor) -> PolicyLoss:
        return PolicyLoss(log_probs_BT * x_BT)

    objective = Objective(registered(loss, prepare=lambda mask_BT: made, makes=("x_BT",)))
    with pytest.raises(ValueError, match=r"policy loss 'own': prepare must make x_BT of \(2, 2\)"):
        objective.prepare(small())


def test_a_users_loss_cannot_spoil_the_batch(registered: Callable[..., str]) -> None:
    def spoil(*tensors: Tensor) -> None:
        for x in tensors:
            x.detach().zero_()

    def prepare(old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
        spoil(old_log_probs_BT, advantages_BT, mask_BT)
        return {"x_BT": torch.ones_like(advantages_BT)}

    def loss(log_probs_BT: Tensor, old_log_probs_BT: Tensor, mask_BT: Tensor, x_BT: Tensor, entropy_BT: Tensor) -> Any:
        result = PolicyLoss(-log_probs_BT * x_BT)
        spoil(old_log_probs_BT, mask_BT, x_BT, entropy_BT)
        return result

    name = registered(loss, prepare=prepare, makes=("x_BT",))
    mask = torch.tensor([[True, True], [True, False]])
    data, entropy, log_probs = small(loss_mask=mask), torch.full((2, 2), 0.5), torch.full((2, 2), 3.0)
    data |= Objective(name).prepare(data)
    before = {key: value.clone() for key, value in data.items()}
    result = Objective(name)(log_probs, entropy, data, denominators(mask))
    assert all(torch.equal(data[key], value) for key, value in before.items()) and mask.sum() == 3
    assert result.loss == -3.0 and result.sums["entropy"] == 0.5 and result.sums["ppo_kl"] == -2.0


# --- shapes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policy_loss.names)
def test_each_loss_names_what_has_another_shape(name: str) -> None:
    """(4,) and (3, 1) would broadcast to (3, 4)."""
    function, right = get_policy_loss(name), torch.ones(3, 4)
    known = {n for n in DATA if n in policy_loss.required(name)}
    for wrong in known:
        for other in (torch.ones(4), torch.ones(3, 1)):
            with pytest.raises(ValueError, match=rf"^{wrong} is \({other.shape[0]},.*the mask is \(3, 4\); it must be"):
                call(function, dict.fromkeys((*DATA, "mask_BT"), right) | {wrong: other})
    prepare = policy_loss.traits(name).prepare
    if prepare is not None:
        with pytest.raises(ValueError, match=r"^advantages_BT is \(3, 1\), the mask is \(3, 4\)"):
            call(prepare, dict.fromkeys((*DATA, "mask_BT"), right) | {"advantages_BT": torch.ones(3, 1)})


def test_other_functions_name_what_has_another_shape() -> None:
    a, row, column = torch.ones(3, 4), torch.ones(4), torch.ones(3, 1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: kl(a, row, a), "ref_log_probs_BT"),
        (lambda: kl(a, a, torch.ones(5, 3, 4)), "mask_BT"),
        (lambda: kl(a, a, column), "log_probs_BT"),
        (lambda: value_loss(a, row, a, a), "old_values_BT"),
        (lambda: value_loss(a, a, column, a), "returns_BT"),
        (lambda: aggregate(a, row, "token_mean"), "mask_BT"),
        (lambda: aggregate(a, column, "seq_mean_token_mean"), "loss_BT"),
        (lambda: denominators(row), "mask_BT"),
        (lambda: denominators([[1]]), "mask_BT is of type list; it must be a tensor"),  # type: ignore[arg-type]
    ]
    for function, said in cases:
        with pytest.raises(ValueError, match=f"^{said}"):
            function()
    data = small()
    with pytest.raises(ValueError, match=r"entropy is \(1, 1\); as the model.s output it must be \(2, 2\)"):
        Objective()(torch.ones(2, 2), torch.ones(1, 1), data, denominators(torch.ones(2, 2)))


# --- denominators -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, -1, NAN, "8"])
def test_a_length_that_no_response_has(length: Any) -> None:
    with pytest.raises(ValueError, match="max_length is .*; it must be"):
        denominators(torch.ones(1, 2), max_length=length)


def test_denominators_that_no_mini_batch_has() -> None:
    for wrong in ((-1.0, 1.0, 1.0), (1.0, NAN, 1.0), (1.0, 1.0, INF)):
        with pytest.raises(ValueError, match="denominators: .* is .*; it must be"):
            Denominators(*wrong)
    for wrong in ((5.0, 0.0, 3.0), (5.0, 2.0, 0.0)):
        with pytest.raises(ValueError, match="where there are tokens, sequences and max_length must be above 0"):
            Denominators(*wrong)
    none, data = Denominators(0, 0, 0), small(values=torch.ones(2, 2), returns=torch.ones(2, 2))
    for refuse in (
        lambda: Objective()(data["advantages"], None, data, none),
        lambda: ValueObjective()(data["values"], data, none),
    ):
        with pytest.raises(ValueError, match="the denominators count no tokens, but there are some"):
            refuse()
    nothing = data | {"loss_mask": torch.zeros(2, 2)}
    assert Objective()(data["advantages"], None, nothing, none).loss == 0

"""Names, a user's own functions by dotted path, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.algorithms import Objective, advantage, call, denominators, get_advantage, get_policy_loss

MODULE = """
from megarl.algorithms import Advantage, PolicyLoss
import torch

def half(reward_BT, mask_BT, group_B):
    return Advantage(reward_BT / 2, reward_BT)

def wants_more(reward_BT, mask_BT, crystal_ball):
    return None

def no_rewards(mask_BT, group_B):
    return None

def of_singletons(reward_BT, mask_BT, singleton):
    return None

def of_all_settings(reward_BT, mask_BT, gamma, lam, normalize_std):
    return None

def open_to_all(**offered):
    return sorted(offered)

def careless(log_probs_BT, advantages_BT, mask_BT, *, weight=1.0):
    ratio_BT = (log_probs_BT - log_probs_BT.detach()).exp()
    loss_BT = -weight * advantages_BT * ratio_BT * log_probs_BT.exp() * mask_BT
    return PolicyLoss(loss_BT, ratio_BT, torch.zeros_like(mask_BT))

def not_a_loss(log_probs_BT, mask_BT):
    return log_probs_BT

def one_a_sample(log_probs_BT):
    return PolicyLoss(log_probs_BT.sum(-1), log_probs_BT, log_probs_BT > 0)

def breaks(log_probs_BT):
    return 1 / 0

number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_algorithms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_algorithms"


def test_a_users_estimator(own_module: str) -> None:
    half = get_advantage(f"{own_module}.half")
    offered = {"reward_BT": torch.ones(1, 1), "mask_BT": torch.ones(1, 1), "group_B": ["g"], "normalize_std": True}
    assert call(half, offered).advantages_BT.item() == 0.5
    assert call(get_advantage(f"{own_module}.open_to_all"), offered) == sorted(offered)


def test_a_users_loss_is_safe_from_masked_junk(own_module: str) -> None:
    """The user multiplies by the mask, through which NaN and its gradient would pass."""
    mask = torch.tensor([[1.0, 0.0]])
    log_probs = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    data = {"old_log_probs": log_probs.detach(), "advantages": torch.tensor([[2.0, float("nan")]]), "loss_mask": mask}
    result = Objective(policy_loss=f"{own_module}.careless")(log_probs, None, data, denominators(mask))
    result.loss.backward()
    assert log_probs.grad is not None and log_probs.grad[0, 1].item() == 0.0
    assert result.loss.item() == pytest.approx(-2.0 * 0.36787944)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("not_a_loss", TypeError, "must return a PolicyLoss, not Tensor"),
        ("one_a_sample", ValueError, r"own_algorithms.one_a_sample': loss_BT must be of shape \(2, 2\), not \(2,\)"),
        ("breaks", RuntimeError, "own_algorithms.breaks' failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_loss_must_return_a_policy_loss(own_module: str, name: str, error: type[Exception], said: str) -> None:
    mask = torch.ones(2, 2)
    data = {"old_log_probs": mask, "advantages": mask, "loss_mask": mask}
    with pytest.raises(error, match=said):
        Objective(policy_loss=f"{own_module}.{name}")(mask, None, data, denominators(mask))


def test_refusals_say_what_is_wrong(own_module: str) -> None:
    cases = {
        "grop": "no advantage estimator 'grop'; did you mean 'grpo'",
        f"{own_module}.missing": "cannot be imported: .*missing",
        "no_such_package.module.function": "cannot be imported: No module named 'no_such_package'",
        f"{own_module}.number": "is not a function",
        f"{own_module}.no_rewards": "does not take reward_BT",
        f"{own_module}.wants_more": "asks for 'crystal_ball'.*what it can be given: reward_BT, mask_BT, group_B",
        ".half": "cannot be imported",
        f"{own_module}.of_singletons": "asks for 'singleton'.*what it can be given: .*, gamma, lam, normalize_std$",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            get_advantage(name)
    assert advantage.options(f"{own_module}.of_all_settings") == advantage.settings
    for name in (None, 3, ["grpo"]):
        with pytest.raises(ValueError, match="advantage estimator is .*; it must be a name or a dotted path"):
            get_advantage(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no policy loss 'vanila'; did you mean 'vanilla'"):
        get_policy_loss("vanila")


def test_a_name_is_registered_once() -> None:
    def other(reward_BT: torch.Tensor) -> None:
        return None

    with pytest.raises(ValueError, match="'grpo' is registered already"):
        advantage("grpo")(other)  # type: ignore[type-var]
    assert "grpo" in advantage.names


def test_what_a_function_needs() -> None:
    assert advantage.required("grpo") == ("reward_BT", "mask_BT", "group_B")
    assert advantage.required("gae") == ("reward_BT", "mask_BT", "values_BT")
    assert advantage.required("remax") == ("reward_BT", "mask_BT", "baseline_B")


def test_options_are_keywords_of_the_function(own_module: str) -> None:
    assert set(advantage.options("grpo_passk")) == {"k", "normalize_std", "singleton", "eps"}
    advantage.check_options("grpo_passk", {"k": 4, "eps": 1e-4})
    advantage.check_options(f"{own_module}.open_to_all", {"anything": 1})
    cases = {
        ("grpo_passk", "singelton"): "'grpo_passk' has no option 'singelton'; did you mean 'singleton'",
        ("grpo", "temperature"): "'grpo' has no option 'temperature'. Its options are singleton, eps",
        (f"{own_module}.half", "k"): "has no option 'k'. It has no options",
        ("gae", "values_BT"): "'gae': 'values_BT' is data that the trainer gives, not an option",
        ("grpo", 3): "'grpo' has no option 3. Its options are",
    }
    for (name, option), message in cases.items():
        with pytest.raises(ValueError, match=message):
            advantage.check_options(name, {option: 1})

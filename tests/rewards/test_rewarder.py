"""The rewarder over real batches: what it decodes, what it hands over, what it says when a function misbehaves."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.batch import Batch, Sample
from megarl.config.schema import RewardConfig
from megarl.errors import ConfigError, RunError, UserError
from megarl.rewards import Rewarder, accuracy, check_reward, get_reward


@pytest.fixture(autouse=True)
def own_folder(monkeypatch):
    """A user stands in the folder of his module, which is on no path."""
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path(__file__).parent))])
    monkeypatch.delitem(sys.modules, "user_rewards", raising=False)


def batch_of(tokenizer, responses, payloads) -> Batch:
    samples = []
    for at, (response, payload) in enumerate(zip(responses, payloads, strict=True)):
        ids = tokenizer(response, add_special_tokens=False)["input_ids"]
        prompt = tokenizer("12 is no answer" * at)["input_ids"] or [5]  # numbers of a prompt are not the response's
        samples.append(Sample(f"train-{at}", f"g{at}", prompt, ids, [1] * len(ids), [-0.5] * len(ids), payload=payload))
    return Batch.from_samples(samples)


def test_every_response_is_decoded_and_scored_by_its_own_answer(tokenizer):
    responses = ["It is 7.<|im_end|>", "", "8<|im_end|>", "say 10 or 11"]
    batch = batch_of(tokenizer, responses, [{"answer": "7"}, {"answer": "7"}, {"answer": 8}, {"answer": "10"}])
    scored = Rewarder(RewardConfig("last_number"), tokenizer).score(batch)
    assert scored["reward"].dtype == torch.float32
    assert scored["reward"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert list(scored["response_text"]) == ["It is 7.", "", "8", "say 10 or 11"]
    assert accuracy(scored["reward"]) == 0.5 and math.isnan(accuracy([]))
    assert set(scored.names) == {"reward", "response_text"} and "response_text" not in batch
    joined = batch.union(scored)
    assert joined["reward"].tolist() == [1.0, 0.0, 1.0, 0.0] and joined["uid"][3] == "train-3"
    assert len(Rewarder(RewardConfig("last_number"), tokenizer).score(batch.take([]))) == 0


def test_a_users_function_gets_text_payload_and_options(tokenizer):
    batch = batch_of(
        tokenizer, ["abc", "de"], [{"answer": "abc", "level": 3}, {"answer": "x", "level": np.float32(0.25)}]
    )
    for name, options, scores in (
        ("user_rewards.length", {}, [3, 2]),
        ("user_rewards.length", {"scale": 0.5}, [1.5, 1]),
        ("user_rewards.level", {}, [3, 0.25]),
        ("user_rewards.truth", {}, [1, 0]),
    ):
        assert Rewarder(RewardConfig(name, options), tokenizer).score(batch)["reward"].tolist() == scores


def test_a_function_that_raises_stops_the_run_with_its_name_the_sample_and_the_place(tokenizer):
    batch = batch_of(tokenizer, ["a", "b"], [{}, {}])
    with pytest.raises(RunError) as caught:
        Rewarder(RewardConfig("user_rewards.fails"), tokenizer).score(batch)
    said = str(caught.value)
    assert said.startswith(
        "the reward function 'user_rewards.fails', given sample 1 of the step (problem train-1), failed: KeyError"
    )
    assert "user_rewards.py:" in said and "\n" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (math.nan, "answered nan, not a finite number"),
        (-math.inf, "answered -inf, not a finite number"),
        (np.float32("nan"), "not a finite number"),
        (1e39, "answered 1e+39, not a finite number"),
        (10**400, "not a finite number"),
        (None, "answered None (NoneType), not a number"),
        ("1.0", "answered '1.0' (str), not a number"),
        ([1.0], "(list), not a number"),
        (1j, "(complex), not a number"),
    ],
)
def test_what_is_no_finite_number_stops_the_run(tokenizer, given, said):
    batch = batch_of(tokenizer, ["a"], [{"give": given}])
    with pytest.raises(RunError) as caught:
        Rewarder(RewardConfig("user_rewards.odd_one_out"), tokenizer).score(batch)
    assert "user_rewards.odd_one_out" in str(caught.value) and said in str(caught.value)


def test_named_parts_add_up_and_are_kept(tokenizer):
    gives = [{"right": 1, "format": 0.5}, {"format": np.float32(0.25), "right": 0}]
    batch = batch_of(tokenizer, ["a", "b"], [{"give": give} for give in gives])
    scored = Rewarder(RewardConfig("user_rewards.odd_one_out"), tokenizer).score(batch)
    assert scored["reward"].tolist() == [1.5, 0.25]
    assert scored["reward_parts"].tolist() == [[0.5, 1.0], [0.25, 0.0]]
    assert scored.meta["reward_parts"] == ["format", "right"]
    assert batch.union(scored).take(torch.tensor([1]))["reward_parts"].tolist() == [[0.25, 0.0]]


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (
            [{"a": 1}, 2.0],
            "sample 1 of the step (problem train-1), answered one number, and for sample 0 it answered the parts a",
        ),
        ([{"a": 1}, {"a": 1, "b": 2}], "answered the parts a, b, and for sample 0 it answered the parts a"),
        ([{"a": math.nan}], "answered nan as its part 'a', not a finite number"),
        ([{"a": None}], "answered None as its part 'a' (NoneType), not a number"),
        ([{}], "its parts must have names"),
        ([{3: 1.0}], "its parts must have names"),
        ([{"a": 3e38, "b": 3e38}], "whose sum is not a finite number"),
    ],
)
def test_parts_that_do_not_fit_stop_the_run(tokenizer, gives, said):
    batch = batch_of(tokenizer, ["a", "b"][: len(gives)], [{"give": give} for give in gives])
    with pytest.raises(RunError) as caught:
        Rewarder(RewardConfig("user_rewards.odd_one_out"), tokenizer).score(batch)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("last_numbr", {}, "there is no reward 'last_numbr'; did you mean 'last_number'?"),
        ("zzz", {}, "there are: digit_share, exact_match, last_number, math_verify"),
        ("no_such_module.score", {}, "importing 'no_such_module' failed: ModuleNotFoundError"),
        ("user_rewards.nothing", {}, "'nothing' is not there in module 'user_rewards'"),
        ("user_rewards.CONSTANT", {}, "'CONSTANT' is not callable in module 'user_rewards'"),
        ("user_rewards.too_few", {}, "cannot be called as f(text, answer, payload, **options): too many positional"),
        ("user_rewards.length", {"scal": 2}, "got an unexpected keyword argument 'scal'"),
        ("last_number", {"tolerance": 1}, "got an unexpected keyword argument 'tolerance'"),
    ],
)
def test_a_reward_that_cannot_be_used_is_one_sentence_before_the_run(tokenizer, name, options, said):
    faults = check_reward(RewardConfig(name, options))
    assert len(faults) == 1 and said in faults[0]
    with pytest.raises(ConfigError):
        Rewarder(RewardConfig(name, options), tokenizer)


def test_a_module_that_fails_while_imported_says_how(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_rewards.py").write_text("def score(:\n")
    with pytest.raises(UserError, match="importing 'broken_rewards' failed: SyntaxError"):
        get_reward("broken_rewards.score")


@dataclass
class Question:
    where: str
    answer: object


def test_answers_that_the_reward_cannot_use_are_found_before_the_run(tokenizer):
    questions = [Question("a:1", "7"), Question("a:2", "seven"), Question("a:3", None), Question("a:4", True)]
    faults = Rewarder(RewardConfig("last_number"), tokenizer).check_answers(questions)
    assert [fault.split(": ")[0] for fault in faults] == ["a:2", "a:3", "a:4"]
    assert faults[0] == "a:2: the answer 'seven' holds no number, which reward 'last_number' needs"
    assert len(Rewarder(RewardConfig("exact_match"), tokenizer).check_answers(questions)) == 1
    assert Rewarder(RewardConfig("user_rewards.truth"), tokenizer).check_answers(questions) == []

"""Reading a run back, and the numbers of its summary."""

import json
import math

import pytest

from megarl.errors import UserError
from megarl.observe import RunFolder
from megarl.observe.report import best_run, columns, load, summarise
from tests.observe.conftest import metrics_of


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "", tensorboard=False)
    folder.add_step(1, {"reward/accuracy": 0.5})
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward/acc')
    assert load(folder.path).metrics == {"step": [1.0], "reward/accuracy": [0.5]}
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('\n{"step": 3}\n')  # no longer the last
    with pytest.raises(UserError, match=r"metrics.jsonl:2: malformed JSON"):
        load(folder.path)
    with pytest.raises(UserError, match="not a run folder"):
        load(tmp_path)


def test_columns_have_one_entry_a_step_in_the_order_of_steps():
    rows = [
        {"step": 2, "a": 1},
        {"step": 0, "eval/accuracy": 0.1},
        {"step": 2, "eval/accuracy": "Infinity"},
        {"step": 1, "a": "x"},
    ]
    found = columns(rows)
    assert found["step"] == [0.0, 1.0, 2.0]
    assert (
        found["eval/accuracy"][0] == 0.1
        and math.isnan(found["eval/accuracy"][1])
        and found["eval/accuracy"][2] == math.inf
    )
    assert [math.isnan(value) for value in found["a"]] == [True, True, False]


def test_the_summary_of_a_run_that_learned():
    rows = [{"step": 0, "eval/accuracy": 0.25, "time/evaluate": 99.0}]
    rows += [{"step": step, **metrics_of(step)} for step in range(1, 15)]  # 0.2, 0.3, ... 1.0 and then 1.0
    rows[13]["reward/accuracy"] = 0.5
    rows += [{"step": 14, "eval/accuracy": 0.75, "time/evaluate": 50.0}]
    found = summarise(columns(rows))
    assert found["steps"] == 14
    assert found["training_accuracy"]["first"] == pytest.approx(0.3)
    assert found["training_accuracy"]["last"] == pytest.approx((0.6 + 0.7 + 0.8 + 0.9 + 5 * 1.0 + 0.5) / 10)
    assert found["training_accuracy"]["best"] == found["training_accuracy"]["last"]
    assert found["greedy_accuracy"] == {"before": 0.25, "after": 0.75, "gain": 0.5}
    assert found["seconds"]["step_mean"] == 4.0 and found["seconds"]["whole"] == 56.0  # evaluations are no steps
    assert found["seconds"]["by_stage"] == pytest.approx(
        {"rollout": 1.0, "log_probs": 0.5, "update": 2.0, "reshard": 0.5}
    )
    assert sum(found["seconds"]["share"].values()) == pytest.approx(1.0)
    assert found["mismatch"]["abs_max"] == pytest.approx(1.4)
    assert found["reshards_verified"] is True
    rows[5]["reshard/verified"] = 0.0
    assert summarise(columns(rows))["reshards_verified"] is False


@pytest.mark.parametrize(
    "rows", [[], [{"step": 0}], [{"step": 0, "eval/accuracy": 0.5}], [{"step": 1, "reward/accuracy": "NaN"}]]
)
def test_a_run_that_measured_nothing_has_a_summary_of_nothing(rows):
    found = summarise(columns(rows))
    assert (
        found["steps"] == 0 and found["training_accuracy"]["last"] is None and found["greedy_accuracy"]["after"] is None
    )
    json.dumps(found, allow_nan=False)


def test_the_best_ten_in_a_row():
    assert best_run([0.0] * 5 + [1.0] * 9 + [0.0] * 5) == pytest.approx(0.9)
    assert best_run([0.2, 0.4]) == pytest.approx(0.3)
    assert best_run([1, 5, 6, 2], length=2) == 5.5
    assert math.isnan(best_run([]))

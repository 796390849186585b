"""The benchmark of estimators on small inputs, without peers: that it runs and tells the truth, not how fast anything is."""

import math

import pytest

from benchmarks import estimators


@pytest.fixture(autouse=True)
def without_peers(monkeypatch):
    monkeypatch.setattr(estimators, "PEERS", False)
    monkeypatch.setattr(estimators, "SECONDS", 0.01)


def test_rows_of_every_advantage_and_loss():
    rows = [row for kind in ("", "loss") for row in estimators.work(kind, estimators.QUICK, "", "", 1)]
    names = {row.name for row in rows}
    assert {"grpo: ours, ms", "grpo: time ÷ the floor's", "gae: ours, ms", "loss kl_cov: ours, ms"} <= names
    assert {f"long tail, {name}: ours, ms" for name in ("grpo", "gae", "loss vanilla")} <= names
    assert all(math.isfinite(row.value) and row.value > 0 for row in rows)


def test_the_floor_is_what_the_formula_says():
    data = estimators.inputs((16, 8))
    found = [run() for run in estimators.floors(data).values()]
    score_B = (data["reward_BT"] * data["mask_BT"]).sum(1)
    for advantages_BT in found:
        assert advantages_BT.equal(score_B[:, None] * data["mask_BT"])


def test_a_peer_that_computes_something_else_is_refused():
    case = estimators.group_case("grpo", estimators.inputs((16, 8)))
    estimators.check(case._replace(peers={"verl": {"": case.ours}}))
    with pytest.raises(RuntimeError, match="grpo: ours and verl differ by"):
        estimators.check(case._replace(peers={"verl": {"": lambda: case.ours() + 0.01}}))
    estimators.check(case._replace(peers={"verl": {"": lambda: case.ours() + 0.01}}, differs=("verl",)))


def test_the_fastest_way_of_a_peer_counts(monkeypatch):
    seconds = {"fast": 1.0, "slow": 2.0, "far too slow": 9.0, "ours": 0.5}
    monkeypatch.setattr(estimators, "clock", lambda run: seconds[run()])
    case = estimators.Case("a case", lambda: "ours", {"a peer": {}}, {"a peer": 3.0}, lambda result: result)
    ways = {name: lambda name=name: name for name in ("slow", "far too slow", "fast")}
    rows = {row.name: row for row in estimators.time_rows(case._replace(peers={"a peer": ways}))}
    assert rows["a case: a peer, ms"].value == 1000
    assert rows["a case: a peer ÷ ours, time"][1:] == (2.0, 3.0, False)


def test_a_goal_that_the_floor_does_not_reach_says_so(monkeypatch):
    seconds = {"ours": 1.25, "floor": 1.0, "far": 9.0, "near": 1.5, "bare": 1.2, "without a goal": 1.8}
    monkeypatch.setattr(estimators, "clock", lambda run: seconds[run()])
    peers = {who: {"": lambda who=who: who} for who in ("floor", "far", "near", "without a goal")}
    goals = {"floor": 1.3, "far": 8.0, "near": 2.0}
    case = estimators.Case("x", lambda: "ours", peers, goals, None, matching={"without a goal": lambda: "bare"})
    rows = {row.name: row for row in estimators.time_rows(case)}
    assert rows["x: far ÷ ours, time"].met is False and rows["x: time ÷ the floor's"].met
    assert not rows["x: near ÷ ours, time (the floor does not reach this either)"].met
    assert rows["x: near ÷ the floor, time: the most there is"].value == 1.5
    assert rows["x: without a goal ÷ ours, time"][1:] == (1.5, None, True)

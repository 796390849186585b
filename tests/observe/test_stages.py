"""The timer, by a clock that stands still unless told."""

import pytest

from megarl.observe import Stages


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_steps_stages_sum_to_its_time(clock):
    stage = Stages(clock=clock)
    clock.wait(50)  # start-up outside all stages
    with stage("starting the engine"):
        clock.wait(20)
    with stage("rollout"):
        clock.wait(2)
    clock.wait(0.5)
    with stage("update"):
        clock.wait(3)
    with stage("rollout"):
        clock.wait(1)
    assert stage.collect() == {"rollout": 3.0, "other": 0.5, "update": 3.0}
    assert stage.totals["starting the engine"] == 20.0


def test_what_lies_between_two_steps_is_no_steps(clock):
    stage = Stages(clock=clock)
    with stage("rollout"):
        clock.wait(2)
    stage.collect()
    clock.wait(9)
    with stage("log"):
        clock.wait(1)
    with stage("evaluate"):
        clock.wait(30)
    with stage("rollout"):
        clock.wait(2)
    assert stage.collect() == {"log": 1.0, "rollout": 2.0, "other": 0.0}
    assert stage.take("evaluate") == 30.0
    assert stage.take("evaluate") == 0.0


def test_an_inner_stage_takes_its_seconds_from_the_outer(clock):
    seen = []
    stage = Stages(seen.append, clock)
    with stage("update"):
        clock.wait(1)
        with stage("reshard"):
            clock.wait(4)
        clock.wait(2)
    assert stage.collect() == {"update": 3.0, "reshard": 4.0, "other": 0.0}
    assert seen == ["update", "reshard", "update", None]
    assert stage.current is None


def test_seconds_count_whatever_ends_the_stage(clock):
    stage = Stages(clock=clock)
    with pytest.raises(KeyError), stage("update"):
        clock.wait(3)
        raise KeyError
    assert stage.current is None and stage.collect() == {"update": 3.0, "other": 0.0}

"""Who samples what: every response once, whatever engines do. And when a response or an engine cannot be right."""

import itertools
import math
import random

import pytest

from megarl.batch.sample import Prompt
from megarl.errors import RunError
from megarl.rollout.answers import Open
from megarl.rollout.group import begin
from megarl.rollout.router import Router
from megarl.rollout.sampling import Answer, Ask, Progress
from megarl.rollout.stopping import StopText

BUDGET = 20


def prompts(count, generator=None):
    lengths = [generator.randint(1, 30) if generator else 5 for _ in range(count)]
    return [Prompt(f"p{i}", [i] * length) for i, length in enumerate(lengths)]


def router():
    return Router(BUDGET, itertools.count(), seed=1)


class World:
    """Engines that sample one token at a time, and tell with each token whose it is and where it stands."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.router = router()
        self.engines: dict[int, dict[int, Ask]] = {}
        self.version = 1

    def join(self, number):
        self.router.join(number, self.random.randint(1, 12))
        self.engines[number] = {}

    def turn(self):
        """Returns the groups that were finished in it."""
        asks = self.router.dispatch(list(self.engines))
        for number, new in asks.items():
            self.engines[number] |= {ask.key: ask for ask in new}
        number = self.random.choice(list(self.engines))
        open_asks = self.engines[number]
        answers = [
            self.answer(open_asks.pop(key)) for key in self.random.sample(sorted(open_asks), len(open_asks) // 2)
        ]
        return self.router.answered(number, answers)

    def answer(self, ask, reason=None):
        reason = reason or self.random.choice(["stop", "length"])
        count = self.random.randint(0, ask.budget) if reason == "abort" else self.random.randint(1, ask.budget)
        at = len(ask.begun_ids)
        return Answer(ask.key, list(range(at, at + count)), [-1.0] * count, reason, self.version)

    def lose(self):
        number = self.random.choice(list(self.engines))
        owed = len(self.engines.pop(number))
        assert self.router.lose(number) == owed
        self.join(number)

    def abort(self):
        self.router.abort()
        for number, open_asks in self.engines.items():
            self.router.answered(number, [self.answer(ask, "abort") for ask in open_asks.values()])
            open_asks.clear()
        self.version += 1
        return self.router.left()


@pytest.mark.parametrize("seed", range(60))
def test_every_response_is_finished_once_whatever_happens(seed):
    world = World(seed)
    for number in range(world.random.randint(1, 4)):
        world.join(number)
    groups = begin(prompts(world.random.randint(1, 12), world.random), world.random.randint(1, 4))
    world.router.add(groups)
    done = []
    while world.router.unanswered:
        done += world.turn()
        event = world.random.random()
        if event < 0.1:
            world.lose()
        elif event < 0.15:
            left = world.abort()
            assert not any(group.finished for group in left)
            done += [group for group in groups if group.finished and group not in done]
            world.router.add(left)
    assert sorted(group.order for group in done) == list(range(len(groups)))
    for group in groups:
        assert len(group.samples()) == len(group.responses)
        for response in group.responses:
            # every piece stands where it belongs, and none twice
            assert response.token_ids == list(range(len(response.token_ids)))
            assert 1 <= len(response.token_ids) <= BUDGET
            assert len(response.log_probs) == len(response.versions) == len(response.token_ids)
            assert response.versions == sorted(response.versions)
            assert response.weight_version == response.versions[0]


def test_groups_stay_whole_and_go_where_the_fewest_tokens_are_owed():
    r = router()
    for number in range(3):
        r.join(number, 100)
    r.add(begin(prompts(9, random.Random(1)), 4))
    asks = r.dispatch([0, 1, 2])
    owners = [{ask.prompt_ids[0] for ask in mine} for mine in asks.values()]
    assert sum(map(len, owners)) == 9
    assert all(len(mine) == 4 * len(owner) for mine, owner in zip(asks.values(), owners, strict=True))
    owed = [sum(a.budget for a in mine) for mine in asks.values()]
    assert max(owed) - min(owed) <= 4 * BUDGET
    # an engine that has answered much is asked next
    r.answered(1, [Answer(ask.key, [1], [-1.0], "stop", 0) for ask in asks[1]])
    r.add(begin(prompts(1), 4, order=9))
    assert [len(mine) for mine in r.dispatch([0, 1, 2]).values()] == [0, 4, 0]


def test_an_engine_is_not_asked_for_more_than_it_samples_at_one_time():
    r = router()
    r.join(0, 5)
    r.add(begin(prompts(3), 2))
    asks = r.dispatch([0])[0]
    assert len(asks) == 4 and r.dispatch([0])[0] == []
    r.answered(0, [Answer(ask.key, [1], [-1.0], "stop", 0) for ask in asks[:2]])
    assert len(r.dispatch([0])[0]) == 2
    big = router()
    big.join(0, 5)
    big.add(begin(prompts(1), 8))
    assert len(big.dispatch([0])[0]) == 8  # larger than the engine: alone, and SGLang queues


def test_answers_to_nothing_are_refused():
    r = router()
    r.join(0, 5)
    r.add(begin(prompts(1), 1))
    (ask,) = r.dispatch([0])[0]
    answer = Answer(ask.key, [1], [-1.0], "stop", 0)
    r.answered(0, [answer])
    with pytest.raises(RunError, match="was not asked"):
        r.answered(0, [answer])


def test_an_unfinished_group_gives_no_samples():
    (group,) = begin(prompts(1), 2)
    with pytest.raises(ValueError, match="2 of its responses"):
        group.samples()


ASK = Ask(7, [1, 2], [], 3)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer(7, [1, 2], [-1.0, -0.5], "stop", 0), None),
        (Answer(7, [1], [1e-7], "length", 0), None),
        (Answer(8, [1], [-1.0], "stop", 0), "request 8 was not asked"),
        (Answer(7, [1, 2], [-1.0], "stop", 0), "2 tokens and 1 log-probs"),
        (Answer(7, [1, 2], [], "stop", 0), "2 tokens and 0 log-probs"),
        (Answer(7, [1] * 4, [-1.0] * 4, "stop", 0), "4 tokens where 3"),
        (Answer(7, [], [], "stop", 0), "no tokens"),
        (Answer(7, [1], [math.nan], "stop", 0), "the log-prob nan"),
        (Answer(7, [1], [-math.inf], "stop", 0), "the log-prob -inf"),
        (Answer(7, [1], [0.5], "stop", 0), "the log-prob 0.5"),
        (Answer(7, [99], [-1.0], "stop", 0), "the token 99, and the model has 50"),
        (Answer(7, [1], [-1.0], "abort", 0), "nobody had stopped it"),
        (Answer(7, [1], [-1.0], "tired", 0), "ended with 'tired'"),
    ],
)
def test_garbage_is_told(answer, says):
    asks = Open(50, 10.0)
    asks.add([ASK])
    fault = asks.take(Progress([answer], 2))
    assert fault is None if says is None else says in fault


def test_who_makes_no_progress_hangs():
    now = [0.0]
    asks = Open(50, 10.0, lambda: now[0])
    now[0] = 100.0
    assert asks.take(Progress([], 0)) is None  # nothing to do
    asks.add([ASK])
    now[0] = 109.0
    assert asks.take(Progress([], 0)) is None
    assert asks.take(Progress([], 1)) is None  # a token
    now[0] = 118.0
    assert asks.take(Progress([], 1)) is None
    now[0] = 120.0
    assert "no token of 1 responses in 11 s" in asks.take(Progress([], 1))


def test_a_response_ends_with_the_token_that_completes_a_stop_text():
    words = ["a", "b", "END", "E", "ND", "\n\n", "x"]

    def decode(ids):
        return "".join(words[i] for i in ids)

    def cut(ids, stop, step):
        watch, grown = StopText(stop, decode), 0
        while grown < len(ids):
            grown = min(len(ids), grown + step)
            if (end := watch.cut(ids[:grown])) is not None:
                return end
        return None

    for step in (1, 2, 4, 100):
        assert cut([0, 1, 2, 6], ("END",), step) == 3
        assert cut([0, 3, 4, 6, 2], ("END",), step) == 3  # over a boundary between tokens
        assert cut([0] * 40 + [3, 4, 6], ("END",), step) == 42
        assert cut([0, 3, 6, 4], ("END",), step) is None
        assert cut([6, 5, 2], ("END", "\n\n"), step) == 2
        assert cut([0, 1], (), step) is None
    assert StopText(("END",), decode, seen=2).cut([0, 3, 4]) == 3  # begun in an earlier piece

"""Problems that reasoning-gym makes: no file, any number of them, the same ones for one seed."""

from __future__ import annotations

import warnings
from typing import Any

from megarl.config.schema import SourceConfig
from megarl.data.problem import Problem, Reading, nearest, source

DEFAULT_SIZE = 500
PATIENCE = 2000  # problems made in a row without a new one among them before a task counts as exhausted


@source("reasoning_gym")
def read_reasoning_gym(config: SourceConfig, excluded: frozenset[str] = frozenset()) -> Reading:
    """`size` different problems of one task, none of them excluded; fewer where the task has no more.

    Problem i of seed s is problem i-1 of seed s+1 (reasoning-gym seeds each with their sum), and a small task such as
    one-digit sums has few problems at all: two seeds do not make two disjoint sets, so equality is by the words asked.
    """
    dataset, faults = _dataset(config)
    if dataset is None:
        return Reading(faults=faults)
    wanted = DEFAULT_SIZE if config.size is None else config.size
    seen = set(excluded)
    problems: list[Problem] = []
    index = last_new = 0
    while len(problems) < wanted and index - last_new < PATIENCE:
        try:
            item = dataset[index]
        except Exception as error:  # noqa: BLE001  the task's own code, with the user's arguments
            return Reading(faults=[f"reasoning-gym task {config.task!r} cannot make problem {index}: {_short(error)}"])
        where = f"{config.task}[{index}]"
        problem = Problem(index, where, item["question"], item["answer"], {"metadata": item["metadata"]})
        if problem.key not in seen:
            seen.add(problem.key)
            problems.append(problem)
            last_new = index
        index += 1
    notes = []
    if len(problems) < wanted:
        other = " outside the evaluation set" if excluded else ""
        notes.append(f"{config.task} has only {len(problems)} different problems{other}, of {wanted} asked for")
    return Reading(problems, notes=notes)


def _dataset(config: SourceConfig) -> tuple[Any, list[str]]:
    try:
        with warnings.catch_warnings():
            # A package below it is full of escapes that Python warns of whenever it compiles them.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError:
        return None, ["a reasoning_gym source needs the package: pip install reasoning-gym"]
    if not config.task:
        return None, ["a reasoning_gym source needs `task`, e.g. chain_sum"]
    if config.task not in DATASETS:
        return None, [f"reasoning-gym has no task {config.task!r}{nearest(config.task, list(DATASETS))}"]
    arguments = dict(config.task_args)
    own = [f"set `{name}` beside `task`, not in `task_args`" for name in ("size", "seed") if name in arguments]
    if own:
        return None, own
    try:
        # The size is only a bound on iteration: problems are made by index, on demand.
        size = config.size or DEFAULT_SIZE
        return reasoning_gym.create_dataset(config.task, size=size, seed=config.seed, **arguments), []
    except Exception as error:  # noqa: BLE001  TypeError: an unknown argument; AssertionError: a value that the task refuses
        return None, [f"reasoning-gym task {config.task!r} refuses its arguments: {_short(error)}"]


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return text or type(error).__name__

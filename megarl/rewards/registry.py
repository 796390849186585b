"""Reward functions by name: the registered ones, and a user's own by its dotted path."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megarl.config.schema import RewardConfig
from megarl.errors import UserError

# fn(text, answer, payload, **options) -> a finite number, or a mapping of named parts whose sum is the reward. text: the
# response, without special tokens; answer: what the data set says; payload: the problem's other keys, and "prompt", the user's
# turn.
RewardFunction = Callable[..., float | Mapping[str, float]]

REWARDS: dict[str, RewardFunction] = {}
ANSWER_CHECKS: dict[str, Callable[[Any], object]] = {}


def reward(
    name: str, check_answer: Callable[[Any], object] | None = None
) -> Callable[[RewardFunction], RewardFunction]:
    """Register a reward. `check_answer` raises ValueError for an answer of the data set that the reward cannot use."""

    def register(function: RewardFunction) -> RewardFunction:
        REWARDS[name] = function
        if check_answer is not None:
            ANSWER_CHECKS[name] = check_answer
        return function

    return register


def get_reward(name: str) -> RewardFunction:
    """The function registered under `name`, or the one at `package.module.function`. UserError says what is missing."""
    if name in REWARDS:
        return REWARDS[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        close = difflib.get_close_matches(name, list(REWARDS), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(REWARDS))}"
        raise UserError(f"reward.name: there is no reward {name!r}; {hint} (or give package.module.function)")
    if os.getcwd() not in sys.path:  # a console script does not see the user's own modules, which lie where he stands
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may fail in any way while it is imported
        raise UserError(f"reward.name: importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "is not callable" if hasattr(module, attribute) else "is not there"
        raise UserError(f"reward.name: {attribute!r} {what} in module {module_name!r}")
    found: RewardFunction = function
    return found


def check_reward(config: RewardConfig) -> list[str]:
    """Everything wrong with the reward's name and options: [] if nothing."""
    try:
        function = get_reward(config.name)
    except UserError as error:
        return [str(error)]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have no signature to check against
        return []
    try:
        signature.bind("text", None, {}, **dict(config.options))
    except TypeError as error:
        return [f"reward {config.name!r} cannot be called as f(text, answer, payload, **options): {error}"]
    return _missing_package(config)


def _missing_package(config: RewardConfig) -> list[str]:
    if config.name == "math_verify" and importlib.util.find_spec("math_verify") is None:
        return ["reward 'math_verify' needs the package: pip install 'math-verify[antlr4-9-3]'"]
    return []

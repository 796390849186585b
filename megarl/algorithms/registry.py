"""Named functions, and a user's own by their dotted path, checked against what the caller can give them."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Registry(Generic[F]):
    """A decorator that registers, and a look-up that also takes "package.module.function".

    kind: what the functions are, for messages.
    inputs: names of the data the caller offers; the first one every function must take.
    settings: names of the settings the caller always gives. A parameter under another name needs a default.
    """

    def __init__(self, kind: str, inputs: Sequence[str], settings: Sequence[str]):
        self.kind = kind
        self.inputs = tuple(inputs)
        self.settings = tuple(settings)
        self._functions: dict[str, F] = {}

    def __call__(self, name: str) -> Callable[[F], F]:
        """`@registry("name")`. Raises ValueError where the name is taken or the signature does not fit."""

        def register(function: F) -> F:
            if self._functions.get(name, function) is not function:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            self._check(name, function)
            self._functions[name] = function
            return function

        return register

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._functions))

    def get(self, name: str) -> F:
        """The function of this name or dotted path. Raises ValueError with one sentence that says what is wrong."""
        if not isinstance(name, str):
            raise ValueError(f"{self.kind} is {name!r}; it must be a name or a dotted path")
        if name in self._functions:
            return self._functions[name]
        if "." not in name:
            there = f"There are {', '.join(self.names)}, or a dotted path"
            raise ValueError(f"no {self.kind} {name!r}{_hint(name, self.names)} {there}")
        module_name, _, attribute = name.rpartition(".")
        try:
            function = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.kind} {name!r} cannot be imported: {' '.join(str(error).split())}") from error
        self._check(name, function)
        return function

    def required(self, name: str) -> tuple[str, ...]:
        """The inputs that this function cannot do without."""
        parameters = inspect.signature(self.get(name)).parameters
        return tuple(i for i in self.inputs if i in parameters and parameters[i].default is inspect.Parameter.empty)

    def options(self, name: str) -> tuple[str, ...]:
        """The keywords of this function that are not inputs."""
        parameters = inspect.signature(self.get(name)).parameters.values()
        return tuple(p.name for p in parameters if p.kind in _KEYWORDS and p.name not in self.inputs)

    def check_options(self, name: str, options: Iterable[str]) -> None:
        """ValueError naming the first option that this function does not have, and the nearest that it has."""
        function, known = self.get(name), self.options(name)
        for option in options:
            if option in self.inputs:
                raise ValueError(f"{self.kind} {name!r}: {option!r} is data that the trainer gives, not an option")
            if option not in known and not _takes_any(function):
                own = [name for name in known if name not in self.settings]
                there = f"Its options are {', '.join(own)}" if own else "It has no options"
                raise ValueError(f"{self.kind} {name!r} has no option {option!r}{_hint(str(option), known)} {there}")

    def _check(self, name: str, function: Any) -> None:
        if not callable(function):
            raise ValueError(f"{self.kind} {name!r} is not a function")
        parameters = inspect.signature(function).parameters.values()
        if not _takes_any(function) and self.inputs[0] not in {p.name for p in parameters}:
            raise ValueError(f"{self.kind} {name!r} does not take {self.inputs[0]}")
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            offered = parameter.name in (*self.inputs, *self.settings)
            if parameter.default is parameter.empty and (not offered or parameter.kind is parameter.POSITIONAL_ONLY):
                raise ValueError(
                    f"{self.kind} {name!r} asks for {parameter.name!r} by name or without a default; "
                    f"what it can be given: {', '.join((*self.inputs, *self.settings))}"
                )


def call(function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call `function` with those of the offered arguments that it takes, by name."""
    if _takes_any(function):
        return function(**offered)
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in offered.items() if name in parameters})


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "."

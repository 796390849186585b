"""Reads a configuration: YAML files composed by `base:`, then dotted overrides, against the schema.

Every key of every file is checked where it stands, so that a message can name the file and the line and all
problems are told at once. OmegaConf converts the values and resolves interpolations (`${rollout.n}`).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.paths import path_fault
from megarl.config.schema import Config, SourceConfig
from megarl.errors import ConfigError

Keys = tuple[str, ...]


class Reading(NamedTuple):
    """What could be read, and everything wrong with it.

    `config` holds the readable settings and defaults for the others, so that further checks can go on and all
    problems be told at once; None where a whole file or an interpolation failed. `unread` names the settings that were
    not understood.
    """

    config: Config | None
    problems: list[str]
    unread: frozenset[str]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a YAML file, with `a.b=value` overrides on top (values are YAML too).

    `base:` in a file names one file or a list of files, relative to that file, which it builds on: later ones win over
    earlier ones and the file wins over its bases. A source of another kind inherits nothing. Raises ConfigError with everything
    that is wrong.
    """
    reading = read(path, overrides)
    if reading.problems or reading.config is None:
        raise ConfigError(reading.problems)
    return reading.config


def read(path: str | Path, overrides: Sequence[str] = ()) -> Reading:
    """As `load`, but gives the problems back beside what could be read."""
    faults = _Faults()
    files = list(_read_file(Path(os.path.expanduser(path)), (), faults))
    commands = [_read_override(text, faults) for text in overrides]
    layers = files + commands
    merged: dict[str, Any] = {}
    command: dict[str, Any] = {}
    for layer in files:
        _merge_sources(merged, _checked(Config, layer, layer.values, (), faults))
    for layer in commands:
        _merge(command, _checked(Config, layer, layer.values, (), faults))
    _merge_sources(merged, command)
    broken = any(layer.broken for layer in layers)
    try:
        tree = OmegaConf.merge(OmegaConf.structured(Config), merged)
        for key in sorted(map(str, OmegaConf.missing_keys(tree))):
            if not broken and key not in faults.unread:  # a file that could not be read may well have set it
                faults.problems.append(f"{key} is not set; write it in the file or add {key}=... to the command")
            faults.unread.add(key)
            OmegaConf.update(tree, key, "")
        config = None if broken else typing.cast(Config, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:  # only interpolations are left to fail here
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        faults.problems.append(f"{key}{_first_line(error)}")
        config = None
    return Reading(config, faults.problems, frozenset(faults.unread))


def dump(cfg: Config) -> str:
    """The configuration as YAML with every key written out; `load` reads it back equal."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dataclasses.asdict(cfg))))


def keys(section: type = Config, prefix: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every setting of a section as (path, type), depth first, sections themselves left out."""
    for name, hint in get_type_hints(section).items():
        inner = section_of(hint)
        if inner is None:
            yield (*prefix, name), hint
        else:
            yield from keys(inner, (*prefix, name))


def section_of(hint: Any) -> type | None:
    """The dataclass behind a field's type, `X` or `X | None`; None for a plain setting."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None


def describe(hint: Any) -> str:
    """A field's type in words, e.g. "a whole number or null"."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    if hint in names:
        return names[hint]
    if get_origin(hint) is Literal:
        return "one of " + ", ".join("null" if choice is None else str(choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        (item,) = get_args(hint)
        return f"a list as [A, B], each {describe(item)}"
    if get_origin(hint) is dict or section_of(hint):
        return "a section of `key: value` lines"
    return " or ".join(describe(kind) for kind in get_args(hint)) or getattr(hint, "__name__", str(hint))


@dataclass
class _Faults:
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Layer:
    """One file or one override: its values, and where each key stands."""

    name: str
    values: dict[Any, Any]
    lines: dict[Keys, int] = field(default_factory=dict)
    broken: bool = False

    def where(self, path: Keys) -> str:
        return f"{self.name}:{self.lines[path]}" if path in self.lines else self.name


def _read_file(path: Path, above: tuple[Path, ...], faults: _Faults) -> Iterator[_Layer]:
    """The layers of a file, its bases first. `above` holds the files that led here."""
    if fault := path_fault(path):
        named = f" (named as base in {above[-1]})" if above else ""
        faults.problems.append(f"{path.name[:60]!r} {fault}{named}")
        yield _Layer(str(path), {}, broken=True)
        return
    real = path.resolve()
    if real in above:
        chain = " -> ".join(str(file) for file in (*above[above.index(real) :], real))
        faults.problems.append(f"{above[-1]}: base goes in a circle: {chain}; remove one of these base lines")
        return
    layer = _parse_file(path, above, faults)
    bases = layer.values.pop("base", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        faults.problems.append(f"{layer.where(('base',))}: base must be a path or a list of paths, not {_shown(bases)}")
        bases = []
    for base in bases:
        yield from _read_file(path.parent / os.path.expanduser(base), (*above, real), faults)
    yield layer


def _parse_file(path: Path, above: tuple[Path, ...], faults: _Faults) -> _Layer:
    broken = _Layer(str(path), {}, broken=True)
    named = f" (named as base in {above[-1]})" if above else ""
    try:
        text = path.read_text(encoding="utf-8")
        values = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except FileNotFoundError:
        faults.problems.append(f"{path}: there is no such file{named}")
    except IsADirectoryError:
        faults.problems.append(f"{path}: this is a folder, not a YAML file{named}")
    except OSError as error:
        faults.problems.append(f"{path}: cannot be read: {error.strerror}{named}")
    except UnicodeDecodeError:
        faults.problems.append(f"{path}: is not UTF-8 text{named}")
    except yaml.YAMLError as error:
        faults.problems.append(f"{_yaml_place(path, text, error)}: not valid YAML: {_yaml_reason(error)}")
    except OmegaConfBaseException as error:
        faults.problems.append(f"{path}: {_first_line(error)}")
    else:
        if isinstance(values, dict) and not (node and isinstance(node, yaml.ScalarNode)):
            return _Layer(str(path), values, dict(_lines(node, ())))
        faults.problems.append(f"{path}: must hold sections of `key: value` lines")
    return broken


def _yaml_place(path: Path, text: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    # Where the end came too soon, the mark may stand after the last line.
    return f"{path}:{min(mark.line + 1, len(text.splitlines()))}" if mark else str(path)


def _yaml_reason(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or _first_line(error))


def _lines(node: yaml.Node | None, prefix: Keys) -> Iterator[tuple[Keys, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*prefix, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _lines(value, path)


def _read_override(text: str, faults: _Faults) -> _Layer:
    name = f"'{text}' on the command line"
    key, equals, value = text.partition("=")
    path = key.split(".")
    if not equals or not all(path):
        faults.problems.append(f"{name}: write an override as section.key=value")
        return _Layer(name, {})
    if path[0] == "base":
        faults.problems.append(f"{name}: base can only stand in a file")
        return _Layer(name, {})
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except yaml.YAMLError as error:
        faults.problems.append(f"{name}: the value is not valid YAML: {_yaml_reason(error)}; put quotes around it")
        return _Layer(name, {})
    except OmegaConfBaseException as error:
        faults.problems.append(f"{name}: {_first_line(error)}")
        return _Layer(name, {})
    assert isinstance(tree, dict)
    values = tree["value"]
    for part in reversed(path):
        values = {part: values}
    return _Layer(name, values)


def _checked(section: type, layer: _Layer, values: dict[Any, Any], prefix: Keys, faults: _Faults) -> dict[str, Any]:
    """The values of a layer that fit the schema, with a problem for each that does not."""
    hints = get_type_hints(section)
    good: dict[str, Any] = {}
    for key, value in values.items():
        path = (*prefix, str(key))
        if key not in hints:
            faults.problems.append(f"{layer.where(path)}: unknown key {'.'.join(path)}{_suggestion(section, path)}")
            continue
        hint = hints[key]
        inner = section_of(hint)
        if inner is not None and isinstance(value, dict):
            good[key] = _checked(inner, layer, value, path, faults)
            continue
        value = _unfold_boolean(hint, value)
        if _fits(section, inner, key, hint, value):
            good[key] = value
        else:
            dotted = ".".join(path)
            faults.unread.add(dotted)
            faults.problems.append(f"{layer.where(path)}: {dotted} must be {describe(hint)}, not {_shown(value)}")
    return good


def _fits(section: type, inner: type | None, key: str, hint: Any, value: Any) -> bool:
    if value == "???" or (type(value) is int and bool in (hint, *get_args(hint))):  # OmegaConf takes both, silently
        return False
    if inner is not None:
        return value is None and types.NoneType in get_args(hint)
    try:
        OmegaConf.update(OmegaConf.structured(section), key, value, merge=False)
    except OmegaConfBaseException:
        return False
    return True


def _unfold_boolean(hint: Any, value: Any) -> Any:
    """YAML reads a bare `off` as false; where `off` is one of the choices, or a text is wanted, that is what was meant."""
    if value is False and (hint is str or (get_origin(hint) is Literal and "off" in get_args(hint))):
        return "off"
    return value


def _suggestion(section: type, path: Keys) -> str:
    """The nearest key of the section; else the place of a key of this name in another section."""
    key = path[-1]
    near = difflib.get_close_matches(key, list(get_type_hints(section)), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join((*path[:-1], near[0]))}?"
    elsewhere = [known for known, _ in keys() if known[-1] == key]
    if not elsewhere:
        last = difflib.get_close_matches(key, [known[-1] for known, _ in keys()], n=1, cutoff=0.8)
        elsewhere = [known for known, _ in keys() if known[-1] in last]
    elsewhere = [known for known in elsewhere if known[0] == path[0]] or elsewhere  # rather in the same role's section
    if elsewhere:
        return f"; did you mean {' or '.join('.'.join(known) for known in elsewhere)}?"
    return f"; known here: {', '.join(get_type_hints(section))}"


def _merge_sources(into: dict[str, Any], values: dict[str, Any]) -> None:
    """`_merge`; but of a source of problems of another kind nothing is kept: a task, or how many to make, is not the file's."""
    ours, theirs = into.get("data") or {}, values.get("data") or {}
    for name in ("train", "eval"):
        old, new = ours.get(name), theirs.get(name)
        if not isinstance(old, dict) or not isinstance(new, dict) or "kind" not in new:
            continue
        if new["kind"] != old.get("kind", SourceConfig().kind):
            ours[name] = {}
    _merge(into, values)


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _escaped(value: Any) -> Any:
    """Text that looks like an interpolation, protected from being read as one."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value)
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return value


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

"""Checkpoints of a run: all that a later process needs to go on as if nothing had happened.

    RUN/checkpoints/step-000012/actor/   parameters and optimizer, torch_dist: read in any layout, taken by `megarl convert`
                                critic/  the same, where the recipe has one
                                ranks/   what belongs to a rank of this layout: random states, float8 histories
                                state.json   the controller's part, every setting, and the size of every other file
    RUN/checkpoints/latest               names the newest; moves last

A checkpoint is written under another name and renamed when it is whole, so that whatever is killed, what `latest` names can be read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megarl.bridge.torch_dist_write import checksum
from megarl.config import Config
from megarl.config.paths import user_path
from megarl.errors import RunError, UserError
from megarl.observe.files import write_whole, writing

FOLDER, LATEST, STATE = "checkpoints", "latest", "state.json"
_PREFIX = "step-"
# A run that goes on has these; with others it would be another run.
_FIXED = (
    *("model.path", "model.dtype", "data.", "run.seed", "critic.path"),
    *("actor.optimizer.frozen", "critic.optimizer.frozen"),  # what has no state in the checkpoint cannot go on
)


@dataclass(frozen=True)
class Checkpoint:
    """One that is there. `run`: the folder of the run that wrote it."""

    run: Path
    folder: Path
    step: int
    state: dict[str, Any]  # what `Trainer.state_dict` gave
    config: dict[str, Any]
    files: dict[str, int]  # bytes, by path in the folder

    def instead(self) -> str:
        """What to say of other checkpoints beside this one."""
        return _instead(self.folder)


class _Unfinished(NamedTuple):
    target: Path
    aside: Path
    content: dict[str, Any]
    roles: dict[str, Any]


class Checkpoints:
    """Those of one run, of which the newest `keep` stay."""

    def __init__(self, run: Path, keep: int):
        self._folder = run / FOLDER
        self._keep = keep
        self._unfinished: _Unfinished | None = None

    def begin(
        self, step: int, config: Config, state: Mapping[str, Any], roles: Mapping[str, Any], copied: bool = False
    ) -> None:
        """`roles`: by name, what writes the parts of it (`WorkerGroup`); `copied`, while training goes on. Raises RunError where
        anything cannot be written; the older checkpoints stay then."""
        target = self._folder / f"{_PREFIX}{step:06d}"
        aside = target.with_name(f".{target.name}.unfinished")
        with writing(aside):
            for leftover in self._folder.glob(f".{_PREFIX}*.unfinished"):
                shutil.rmtree(leftover)
            aside.mkdir(parents=True)
        try:
            content = json.loads(json.dumps({"step": step, "config": dataclasses.asdict(config), "state": state}))
        except (TypeError, ValueError) as error:
            raise RunError(f"checkpoint of step {step}: a problem holds what JSON cannot ({error})") from error
        for role, group in roles.items():
            group.begin_save(aside, role, copied)
        self._unfinished = _Unfinished(target, aside, content, dict(roles))

    @property
    def unfinished(self) -> int | None:
        """The step of which a checkpoint is being written."""
        return self._unfinished.content["step"] if self._unfinished else None

    def written(self) -> bool:
        """Whether `finish` would not wait."""
        assert self._unfinished is not None
        return all(group.written(role) for role, group in self._unfinished.roles.items())

    def finish(self) -> None:
        """Wait until what `begin` began is written, and make it the newest. Raises RunError as `begin` does."""
        assert self._unfinished is not None
        (target, aside, content, roles), self._unfinished = self._unfinished, None
        files: dict[str, int] = {}
        for role, group in roles.items():
            files |= group.finish_save(role)
        # A rank's own files are small, and nothing else says what is in them.
        sums = {name: checksum(aside / name) for name in files if name.startswith("ranks/")}
        content |= {"files": files, "checksums": sums}
        write_whole(aside / STATE, json.dumps(content | {"digest": _digest(content)}))
        with writing(target):
            old = target.with_name(f".{target.name}.old.unfinished")
            if target.exists():
                target.rename(old)
            aside.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        write_whole(self._folder / LATEST, target.name + "\n")
        with writing(self._folder):
            for _, old in _all(self._folder)[: -self._keep]:
                shutil.rmtree(old)

    def go_on_from(self, step: int) -> None:
        """Later checkpoints belong to a course that is left: they stay under another name, and count no more."""
        with writing(self._folder):
            for later, folder in _all(self._folder):
                if later > step:
                    aside = folder.with_name(f"left-{folder.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    folder.rename(aside)
        write_whole(self._folder / LATEST, f"{_PREFIX}{step:06d}\n")


def find(config: Config) -> Checkpoint | None:
    """The checkpoint that `run.resume` means; None: start from the beginning. Raises UserError where it cannot be read."""
    wanted = config.run.resume
    if wanted == "off":
        return None
    if wanted != "auto":
        return read(user_path(wanted))
    root, name = user_path(config.run.root), re.compile(re.escape(config.run.name) + r"-\d{8}-\d{6}(-\d+)?")
    runs = [path for path in (root.iterdir() if root.is_dir() else ()) if name.fullmatch(path.name) and _newest(path)]
    for run in sorted(runs, key=lambda run: (run / FOLDER).stat().st_mtime, reverse=True):
        if not _finished(run):
            return read(run)
    return None


def newest(run: Path) -> Checkpoint | None:
    """The one that a run would go on from, where there is one."""
    return read(run) if _newest(run) else None


def read(path: Path) -> Checkpoint:
    """A checkpoint, given its folder or that of its run (then the newest). Raises UserError."""
    try:
        path = path.resolve()
        path = _newest(path) or path
        there = (path / STATE).is_file()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if not there:
        others = _instead(path) if path.parent.name == FOLDER else ""
        raise UserError(f"{path} is no checkpoint of a run, nor a run's folder that holds one.{others}")
    step = _step(path)
    if path.parent.name != FOLDER or step is None:
        raise UserError(
            f"{path} does not lie where its run wrote it, and a run goes on in its own folder; give "
            f"RUN/{FOLDER}/{_PREFIX}NNNNNN, or copy the whole run folder and give that"
        )
    content = _content(path, step)
    files: dict[str, int] = content["files"]
    sums: dict[str, int] = content["checksums"]
    missing = [name for name in files if not (path / name).is_file()]
    wrong = [name for name, size in files.items() if name not in missing and (path / name).stat().st_size != size]
    altered = [name for name, found in sums.items() if name not in missing + wrong and checksum(path / name) != found]
    for names, what in (
        (missing, "lacks"),
        (wrong, "holds with another size than was written"),
        (altered, "holds altered:"),
    ):
        if names:
            raise UserError(f"the checkpoint {path} {what} {names[0]}.{_instead(path)}")
    return Checkpoint(path.parent.parent, path, step, content["state"], content["config"], files)


def _content(path: Path, step: int) -> dict[str, Any]:
    """What `save` wrote, to the letter."""
    try:
        content: dict[str, Any] = json.loads(_text(path / STATE))
        digest, step_of = content.pop("digest"), content["step"]
        kinds = all(isinstance(content[key], dict) for key in ("state", "config", "files", "checksums"))
        if digest != _digest(content) or step_of != step or not kinds:
            raise ValueError("it is not what was written")
        return content
    except (KeyError, TypeError, AttributeError) as error:  # JSON, but of something else
        raise UserError(f"{path / STATE} is damaged: it is not what was written.{_instead(path)}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path / STATE} is damaged: {error}.{_instead(path)}") from error


def problems(checkpoint: Checkpoint, config: Config) -> Iterator[str]:
    """A sentence for each changed setting that a run that goes on cannot have."""
    other_roles = (checkpoint.config.get("critic") is None) != (config.critic is None)
    for key, (old, new) in changed(checkpoint, config).items():
        if key.startswith(_FIXED) and not (other_roles and key.startswith("critic.")):
            yield (
                f"run.resume: {key} was {json.dumps(old)} in the run that {checkpoint.folder} is of, and is {json.dumps(new)} now; "
                "set it back, or start a new run with run.resume=off"
            )
    if other_roles:
        was, now = ("had no critic", "has one") if config.critic else ("had a critic", "has none")
        yield f"run.resume: the run that {checkpoint.folder} is of {was}, and this one {now}; start a new run with run.resume=off"
    if checkpoint.step == config.run.steps and _finished(checkpoint.run):
        yield (
            f"run.resume: the run of {checkpoint.folder} has made its run.steps={config.run.steps} and is finished; set run.steps to "
            "more to go on"
        )
    if checkpoint.step > config.run.steps:
        yield (
            f"run.resume: {checkpoint.folder} is of step {checkpoint.step}, and run.steps={config.run.steps}; set run.steps to that "
            "or more"
        )


def changed(checkpoint: Checkpoint, config: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that are not as they were: by key, the value then and now."""
    before, after = _flat(checkpoint.config), _flat(json.loads(json.dumps(dataclasses.asdict(config))))
    aside = ("run.resume", "run.max_restarts", "cluster.")  # of how it is run, not of what
    keys = [key for key in {**before, **after} if not key.startswith(aside)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _all(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints in it, the oldest first."""
    return sorted((step, path) for path in folder.glob(f"{_PREFIX}*") if (step := _step(path)) is not None)


def _step(folder: Path) -> int | None:
    digits = folder.name.removeprefix(_PREFIX)
    return int(digits) if folder.name.startswith(_PREFIX) and digits.isascii() and digits.isdigit() else None


def _newest(run: Path) -> Path | None:
    """The checkpoint that `latest` names; where it names none, the last one."""
    there = {folder.name: folder for _, folder in _all(run / FOLDER) if (folder / STATE).is_file()}
    latest = run / FOLDER / LATEST
    named = there.get(latest.read_text(errors="replace").strip()) if latest.is_file() else None
    return named or (list(there.values())[-1] if there else None)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _instead(folder: Path) -> str:
    """What to say of other checkpoints beside one that cannot be used."""
    others = [path for _, path in _all(folder.parent) if path != folder and (path / STATE).is_file()]
    return f" Another one is there: run.resume={others[-1]}" if others else ""


def _finished(run: Path) -> bool:
    try:
        return bool(json.loads((run / "summary.json").read_text())["status"] == "finished")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False  # it was killed, or is being written


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.{_instead(file.parent)}"
        ) from error

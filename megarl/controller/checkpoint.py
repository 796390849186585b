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
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.paths import user_path
from megarl.errors import RunError, UserError
from megarl.observe.files import write_whole, writing

FOLDER, LATEST, STATE = "checkpoints", "latest", "state.json"
_PREFIX = "step-"
# A run that goes on has these; with others it would be another run.
_FIXED = ("model.path", "data.", "run.seed", "critic.path")


@dataclass(frozen=True)
class Checkpoint:
    """One that is there. `run`: the folder of the run that wrote it."""

    run: Path
    folder: Path
    step: int
    state: dict[str, Any]  # what `Trainer.state_dict` gave
    config: dict[str, Any]
    files: dict[str, int]  # bytes, by path in the folder

    def older(self) -> Path | None:
        """The newest checkpoint of the run before this one."""
        before = [folder for step, folder in _all(self.run / FOLDER) if step < self.step]
        return before[-1] if before else None


class Checkpoints:
    """Those of one run, of which the newest `keep` stay."""

    def __init__(self, run: Path, keep: int):
        self._folder = run / FOLDER
        self._keep = keep

    def save(self, step: int, config: Config, state: Mapping[str, Any], roles: Mapping[str, Any]) -> Path:
        """`roles`: by name, what `save(folder, role)` writes the parts of and answers with the sizes of their files by path. Raises
        RunError where anything cannot be written; the older checkpoints stay then."""
        target = self._folder / f"{_PREFIX}{step:06d}"
        aside = target.with_name(f".{target.name}.unfinished")
        with writing(aside):
            for leftover in self._folder.glob(".*.unfinished"):
                shutil.rmtree(leftover)
            aside.mkdir(parents=True)
        files: dict[str, int] = {}
        for role, group in roles.items():
            files |= group.save(aside, role)
        content = {"step": step, "config": dataclasses.asdict(config), "state": state, "files": files}
        try:
            text = json.dumps(content)
        except (TypeError, ValueError) as error:
            raise RunError(f"checkpoint of step {step}: a problem holds what JSON cannot ({error})") from error
        write_whole(aside / STATE, text)
        with writing(target):
            if target.exists():  # of a run that went on from an older checkpoint
                shutil.rmtree(target)
            aside.rename(target)
        write_whole(self._folder / LATEST, target.name + "\n")
        with writing(self._folder):
            for _, old in _all(self._folder)[: -self._keep]:
                shutil.rmtree(old)
        return target


def find(config: Config) -> Checkpoint | None:
    """The checkpoint that `run.resume` means; None: start from the beginning. Raises UserError where it cannot be read."""
    wanted = config.run.resume
    if wanted == "off":
        return None
    if wanted != "auto":
        return read(user_path(wanted))
    runs = sorted(
        user_path(config.run.root).glob(f"{config.run.name}-*/{FOLDER}/{LATEST}"), key=lambda file: file.stat().st_mtime
    )
    for latest in reversed(runs):
        if not _finished(latest.parent.parent):
            return read(latest.parent.parent)
    return None


def newest(run: Path) -> Checkpoint | None:
    """The one that `latest` names, where there is one."""
    return read(run) if (run / FOLDER / LATEST).is_file() else None


def read(path: Path) -> Checkpoint:
    """A checkpoint, given its folder or that of its run (then the newest). Raises UserError."""
    if (path / FOLDER).is_dir():
        name = _text(path / FOLDER / LATEST).strip()
        path = path / FOLDER / name
    if not (path / STATE).is_file():
        raise UserError(
            f"{path} is no checkpoint of a run, nor a run's folder that holds one: there is no {STATE} in it."
        )
    try:
        content = json.loads(_text(path / STATE))
        step, state, config = int(content["step"]), dict(content["state"]), dict(content["config"])
        files = {str(name): int(size) for name, size in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / STATE} is damaged: {error}.{_instead(path)}") from error
    missing = [name for name in files if not (path / name).is_file()]
    wrong = [name for name, size in files.items() if name not in missing and (path / name).stat().st_size != size]
    for names, what in ((missing, "lacks"), (wrong, "holds with another size than was written")):
        if names:
            raise UserError(f"the checkpoint {path} {what} {names[0]}.{_instead(path)}")
    return Checkpoint(path.parent.parent, path, step, state, config, files)


def problems(checkpoint: Checkpoint, config: Config) -> Iterator[str]:
    """A sentence for each changed setting that a run that goes on cannot have."""
    for key, (old, new) in changed(checkpoint, config).items():
        if key.startswith(_FIXED):
            yield (
                f"run.resume: {key} was {json.dumps(old)} in the run that {checkpoint.folder} is of, and is {json.dumps(new)} now; "
                "set it back, or start a new run with run.resume=off"
            )
    if (checkpoint.config.get("critic") is None) != (config.critic is None):
        was, now = ("had no critic", "has one") if config.critic else ("had a critic", "has none")
        yield f"run.resume: the run that {checkpoint.folder} is of {was}, and this one {now}; start a new run with run.resume=off"
    if checkpoint.step > config.run.steps:
        yield (
            f"run.resume: {checkpoint.folder} is of step {checkpoint.step}, and run.steps={config.run.steps}; set run.steps to that "
            "or more"
        )


def changed(checkpoint: Checkpoint, config: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that are not as they were: by key, the value then and now."""
    before, after = _flat(checkpoint.config), _flat(json.loads(json.dumps(dataclasses.asdict(config))))
    keys = [key for key in {**before, **after} if not key.startswith(("run.resume", "run.max_restarts"))]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _all(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints in it, the oldest first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted((int(path.name.removeprefix(_PREFIX)), path) for path in found)


def _instead(folder: Path) -> str:
    """What to say of other checkpoints beside one that cannot be used."""
    others = [path for _, path in _all(folder.parent) if path != folder and (path / STATE).is_file()]
    return f" An older one is there: run.resume={others[-1]}" if others else ""


def _finished(run: Path) -> bool:
    try:
        return bool(json.loads((run / "summary.json").read_text())["status"] == "finished")
    except (OSError, ValueError, KeyError, TypeError):
        return False  # it was killed, or is being written


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from error

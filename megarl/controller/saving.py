"""When a run is saved, and how it goes back to where it was."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import Config
from megarl.controller.checkpoint import Checkpoint, Checkpoints
from megarl.controller.trainer import Trainer
from megarl.controller.workers import WorkerGroup
from megarl.errors import UserError
from megarl.observe.observer import Observer


class Saving:
    """`step`: the last one that is behind a run when it begins."""

    def __init__(self, config: Config, trainer: Trainer, hosts: Mapping[str, WorkerGroup], observer: Observer):
        self._config, self._trainer, self._observer = config, trainer, observer
        # Only these learn; each is written by the ranks that host it.
        self._roles = {name: hosts[name] for name in ("actor", "critic") if name in hosts}
        self._checkpoints = Checkpoints(observer.folder.path, config.checkpoint.keep)
        self.step = 0

    def due(self, step: int) -> bool:
        every = self._config.checkpoint.every
        return every > 0 and (step % every == 0 or step == self._config.run.steps)

    def save(self, step: int) -> None:
        """Write a checkpoint, or begin to, as the configuration says; one that is being written is waited for."""
        self.finish()
        copied = self._config.checkpoint.asynchronous
        with self._observer.stage("checkpoint"):
            self._checkpoints.begin(step, self._config, self._trainer.state_dict(), self._roles, copied)
        if not copied:
            self.finish()

    def look(self) -> None:
        """A checkpoint that has been written meanwhile becomes the newest."""
        if self._checkpoints.unfinished is not None and self._checkpoints.written():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if one is."""
        step = self._checkpoints.unfinished
        if step is not None:
            with self._observer.stage("checkpoint"):
                self._checkpoints.finish()
            self._observer.saved(step)

    def restore(self, found: Checkpoint) -> None:
        """Everything as it was after the checkpoint's step. Raises UserError where it is damaged or another model's."""
        try:
            same = [group.load(found.folder, role) for role, group in self._roles.items()]
        except UserError as error:
            raise UserError(f"{error}{found.instead()}") from error
        if not all(same) and self._config.actor.precision.fp8 == "delayed":
            self._observer.note("the ranks are other ones than before: float8's histories of magnitudes begin anew")
        self._trainer.load_state_dict(found.state)
        self.step = found.step
        self._checkpoints.go_on_from(found.step)
        self._observer.gone_on(found.step)
        self._observer.note(f"goes on after step {found.step} ({found.folder})")

"""Everything that watches a run, behind one name: the loop says what happened, and this shows and keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from megarl.config.schema import Config
from megarl.errors import RunError
from megarl.observe.conversations import records
from megarl.observe.curve import draw_curve
from megarl.observe.progress import Progress
from megarl.observe.report import columns, summarise
from megarl.observe.result import places_list, result_panel
from megarl.observe.run_folder import RunFolder
from megarl.observe.stages import Stages

if TYPE_CHECKING:
    from megarl.batch import Batch


class Observer:
    """Stages, display and folder of one run.

        with Observer(config, dump(config)) as observer:
            with observer.stage("rollout"): ...
            observer.step(1, metrics, batch)
            observer.finish([("the model", folder)])

    Whatever ends the block, the terminal is given back and summary.json says how the run ended.
    """

    def __init__(
        self,
        config: Config,
        config_text: str,
        console: Console | None = None,
        *,
        resumed: tuple[Path, int] | None = None,
    ):
        """`resumed`: the folder of a run that goes on, and the last step that is behind it."""
        self._rows: list[dict[str, Any]] = []
        if resumed is None:
            self.folder = RunFolder.create(config.run.root, config.run.name, config_text, config.observe.tensorboard)
        else:
            self.folder = RunFolder(resumed[0], config.observe.tensorboard)
        self._text = config_text
        self._going_on = resumed is not None  # until it is where it was
        done = resumed[1] if resumed else 0
        self.progress = Progress(config.run.steps, done=done, live=config.observe.progress, console=console)
        self.stage = Stages(self.progress.stage_changed)
        self._name = config.run.name
        self._samples_every = config.observe.samples_every
        self._finished = False

    def __enter__(self) -> Self:
        self.progress.__enter__()
        self.progress.note(f"run folder  {self.folder.path}", style="dim")
        return self

    def step(self, step: int, metrics: Mapping[str, float], batch: Batch | None = None) -> None:
        """A step is over: its line, its metrics, its samples, and now and then a few conversations."""
        self._add(step, metrics)
        self.progress.show_step(step, metrics)
        if batch is not None:
            said = records(batch, step)
            self.folder.add_samples(said)
            if self._samples_every and (step == 1 or step % self._samples_every == 0):
                self.progress.show_samples(said)

    def evaluated(self, step: int, metrics: Mapping[str, float], batch: Batch | None = None) -> None:
        """The evaluation after `step` (0: before the first) is over."""
        metrics = {**metrics, "time/evaluate": self.stage.take("evaluate")}
        self._add(step, metrics)
        if batch is not None:
            self.folder.add_samples({**record, "split": "eval"} for record in records(batch, step))
        accuracy, after = metrics.get("eval/accuracy"), "before the first step" if step == 0 else f"after step {step}"
        if accuracy is not None:
            self.progress.note(f"held out, greedy, {after}: accuracy {accuracy:.3f}", style="bold magenta")

    def gone_on(self, step: int) -> None:
        """A run that goes on is where it was after `step`: only now does its folder forget what came later."""
        self._rows = self.folder.go_on(step, self._text)
        self._going_on = False

    def saved(self, step: int) -> None:
        """The checkpoint of a step is whole."""
        self._add(step, {"time/checkpoint": self.stage.take("checkpoint")})

    def note(self, text: str) -> None:
        """A line that stays."""
        self.progress.note(text, style="yellow")

    def finish(self, places: Sequence[tuple[str, Path | str]] = ()) -> dict[str, Any]:
        """The run reached its end: summary, curve, table, and where everything lies (`places`: more of it)."""
        metrics = columns(self._rows)
        summary = self._summarise("finished")
        drawn = draw_curve(metrics, self.folder.path / "curve.png", self._name)
        self._finished = True
        self.progress.stop()
        course = [value for value in metrics.get("reward/accuracy", []) if not math.isnan(value)]
        self.progress.show("", result_panel(summary, course))
        self.progress.show(*places_list([*places, ("the run folder", self.folder.path), *self.folder.places()]))
        if not drawn:
            self.progress.note("  (no learning curve: matplotlib is not installed)", style="dim")
        return summary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        try:
            if not self._finished and not self._going_on:
                self._summarise(
                    "interrupted" if error is None or isinstance(error, KeyboardInterrupt) else "failed", error
                )
            self.folder.close()
        except RunError as second:
            if error is None:
                raise
            # The first error is the one to be read at the end; on a full disk this one says the same again.
            self.progress.note(str(second), style="red")

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows.append({"step": step, **metrics})
        self.folder.add_step(step, metrics)

    def _summarise(self, status: str, error: BaseException | None = None) -> dict[str, Any]:
        said = str(error) or ("" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
        summary = {"status": status, **({"error": said} if error and said else {})}
        summary |= summarise(columns(self._rows))
        self.folder.write_summary(summary)
        return summary

"""What a person sees while a run goes on: a live line of the stages below, a permanent line a step above."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from megarl.observe.conversations import choose, panel
from megarl.observe.line import StepLine
from megarl.observe.stages import STEP_STAGES

HEADER_EVERY = 20  # lines
PLAIN_WIDTH = 120  # of a log file, which has none
REFRESHES = 4  # a second: the cores belong to the training
RECENT = 10  # steps whose mean tells how long the rest will take
TITLES = {"log_probs": "log-probs"}


def make_console() -> Console:
    """The terminal as it is; a pipe or a file gets lines of a fixed width, and nothing is ever refused for its letters."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a terminal's encoding cannot
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(width=width, highlight=False)


class Progress:
    """The display of one run. Without a terminal (or with live=False) it prints plain lines and nothing moves."""

    def __init__(self, steps: int, *, done: int = 0, live: bool = True, console: Console | None = None):
        """`done`: steps that an earlier process has made."""
        self.console = console or make_console()
        self.steps = steps
        self._first, self.done = done + 1, done
        self._lines = StepLine(steps, self.console.width)
        self._printed = 0
        self._stage: str | None = None
        self._since = self._begin = self._step_begin = time.monotonic()
        self._finished: dict[str, float] = {}  # stages of this step that are over: seconds
        self._before: dict[str, float] = {}  # of the last step
        self._durations: list[float] = []
        moves = live and self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=REFRESHES,
                          transient=True) if moves else None  # fmt: skip

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the moving part away and give the terminal back; what was printed stays."""
        if self._live is not None:
            self._live.stop()

    def stage_changed(self, name: str | None) -> None:
        """The listener for `Stages`."""
        now = time.monotonic()
        if self._stage is not None:
            self._finished[self._stage] = self._finished.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = name, now
        if self._live is None and name is not None and name not in STEP_STAGES:
            self.console.print(f"[{now - self._begin:6.1f} s] {_title(name)} …", style="dim", markup=False)

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step's line, under a header now and then."""
        if self._printed % HEADER_EVERY == 0:
            self.console.print(self._lines.header(), no_wrap=True, overflow="crop")
        self._printed += 1
        self.console.print(self._lines.line(step, metrics), no_wrap=True, overflow="crop")
        now = time.monotonic()
        if step > self._first:  # the first step's duration holds the start of everything
            self._durations = [*self._durations, now - self._step_begin][-RECENT:]
        self._step_begin, self.done = now, step
        self._before, self._finished = self._finished, {}

    def show_samples(self, samples: Iterable[Mapping[str, Any]], count: int = 3) -> None:
        """A few conversations; the next step's line gets a header again."""
        for sample in choose(list(samples), count):
            self.console.print(panel(sample))
        self._printed = 0

    def note(self, text: str, style: str = "") -> None:
        """A permanent line of its own; never broken or cut, so that a path in it can be copied."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def show(self, *parts: RenderableType) -> None:
        """Anything else that stays; plain lines of text are never broken or cut."""
        for part in parts:
            self.console.print(part, soft_wrap=isinstance(part, Text))

    def _render(self) -> RenderableType:
        now = time.monotonic()
        share = self.done / self.steps if self.steps else 1.0
        width = max(10, self.console.width - 60)
        filled = int(share * width)
        first = Text.assemble(
            (f" step {min(self.done + 1, self.steps)}/{self.steps}  ", "bold"),
            ("━" * filled, "green"), ("━" * (width - filled), "bright_black"),
            f" {100 * share:3.0f}%  ", (f"{clock(now - self._begin)} elapsed", "dim"), (self._left(now), "dim"),
        )  # fmt: skip
        below = Text("\n").join([Text(""), first, self._stage_line(now)])
        below.no_wrap, below.overflow = True, "crop"
        return below

    def _left(self, now: float) -> str:
        if not self._durations:
            return ""
        each = sum(self._durations) / len(self._durations)
        remaining = (self.steps - self.done) * each - min(now - self._step_begin, each)
        return f" · {clock(remaining)} left"

    def _stage_line(self, now: float) -> Text:
        stage, line = self._stage, Text(" ")
        if stage is not None and stage not in STEP_STAGES:
            return line.append(f"▸ {_title(stage)} ", style="bold cyan").append(
                f"{now - self._since:.1f} s", style="cyan"
            )
        for name in STEP_STAGES[:-1]:
            if name == stage:
                spent = self._finished.get(name, 0.0) + now - self._since
                line.append(f"▸ {_title(name)} {spent:.1f} s", style="bold cyan")
            elif name in self._finished:
                line.append(f"✔ {_title(name)} {self._finished[name]:.1f}", style="green")
            else:
                hint = f" ~{self._before[name]:.1f}" if name in self._before else ""
                line.append(f"  {_title(name)}{hint}", style="bright_black")
            line.append("  ")
        return line


def clock(seconds: float) -> str:
    """1:02 or 1:02:03."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _title(stage: str) -> str:
    return TITLES.get(stage, stage)

"""One readable line a step: which numbers, how wide, in which colour, and which of them give way on a narrow terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

BAR = 6  # characters of the bar beside the accuracy
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Column:
    """A number of the line. `keys`: the first of them that the step's metrics hold is shown."""

    title: str
    keys: tuple[str, ...]
    width: int
    form: Callable[[float], str]
    group: str
    rank: int  # the higher, the sooner it is left out
    bar: bool = False


def decimals(places: int) -> Callable[[float], str]:
    """A fixed number of decimals."""
    return lambda value: f"{value:.{places}f}"


def small(value: float) -> str:
    """A number that may be tiny, in six characters: 0.0213, 1.2e-5."""
    if value == 0 or 0.001 <= abs(value) < 100:
        return f"{value:.4f}"[:6] if value else "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def short(value: float) -> str:
    """A positive number of any size, in six characters: 0.021, 2.39, 12.3, 812, 1.2e+5."""
    if value and not 0.001 <= abs(value) < 9999.5:
        return small(value)
    return f"{value:.{3 if abs(value) < 0.1 else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def percent(value: float) -> str:
    """A share: 0.4%, 12%."""
    return f"{100 * value:.1f}%" if value < 0.0995 else f"{100 * value:.0f}%"


def thousands(value: float) -> str:
    """A large number: 812, 12.3k."""
    return f"{value:.0f}" if value < 9999.5 else f"{value / 1000:.1f}k"


COLUMNS = (
    Column("reward", ("reward/mean",), 6, decimals(3), "samples", 4),
    Column("accuracy", ("reward/accuracy",), 8, decimals(3), "samples", 0),
    Column("", ("reward/accuracy",), BAR, decimals(3), "samples", 9, bar=True),
    Column("length", ("response/length_mean",), 6, decimals(1), "samples", 1),
    Column("entropy", ("actor/entropy",), 7, decimals(3), "policy", 1),
    Column("kl", ("actor/kl", "actor/ppo_kl"), 7, small, "policy", 1),
    Column("Δengine", ("mismatch/abs_mean",), 7, small, "policy", 1),
    Column("clip", ("actor/clip_fraction",), 5, percent, "policy", 3),
    Column("grad", ("actor/grad_norm",), 6, short, "policy", 2),
    Column("tok/s", ("throughput/tokens_per_second",), 5, thousands, "speed", 2),
    Column("step", ("time/step",), 5, decimals(1), "seconds", 0),
    Column("rollout", ("time/rollout",), 7, decimals(1), "seconds", 5),
    Column("logp", ("time/log_probs",), 5, decimals(1), "seconds", 6),
    Column("update", ("time/update",), 6, decimals(1), "seconds", 5),
    Column("reshard", ("time/reshard",), 7, decimals(1), "seconds", 6),
)
STYLES = {"samples": "bold", "policy": "cyan", "speed": "magenta", "seconds": "dim"}


class StepLine:
    """Header and lines of one run; the width of a terminal decides once which columns there are."""

    def __init__(self, steps: int, width: int):
        self.steps = steps
        self.label = max(4, 2 * len(str(steps)) + 1)
        self.columns = list(COLUMNS)
        while self._width() > width and len(self.columns) > 1:
            self.columns.remove(max(self.columns, key=lambda column: column.rank))

    def header(self) -> Text:
        """Two lines: what the groups of columns are about, and the columns' names."""
        above, below = Text(" " * self.label), Text("step".rjust(self.label), style="bold")
        group = ""
        for column in self.columns:
            gap = self._gap(group, column.group)
            below.append(gap)
            if column.group != group:
                above.append(gap)
                group = column.group
                span = sum(other.width + 1 for other in self.columns if other.group == group) - 1
                above.append(f"{group} ".ljust(span, "╌")[:span] if span > len(group) + 1 else " " * span, style="dim")
            below.append(column.title.rjust(column.width), style=STYLES[column.group])
        return Text("\n").join([above, below])

    def line(self, step: int, metrics: Mapping[str, float]) -> Text:
        """The step's numbers; an empty place where a step did not measure one."""
        text = Text(f"{step}/{self.steps}".rjust(self.label))
        group = ""
        for column in self.columns:
            text.append(self._gap(group, column.group))
            group = column.group
            value = next((metrics[key] for key in column.keys if key in metrics), None)
            if value is None:
                text.append("·".rjust(column.width), style="dim")
            elif column.bar:
                text.append(bar(value, column.width), style=_colour(value))
            else:
                text.append(_fit(column, value), style=_style(column, value))
        return text

    def _width(self) -> int:
        groups = [column.group for column in self.columns]
        gaps = sum(len(self._gap(before, after)) for before, after in zip(["", *groups], groups, strict=False))
        return self.label + gaps + sum(column.width for column in self.columns)

    @staticmethod
    def _gap(before: str, after: str) -> str:
        return " " if before == after else "  "


def bar(share: float, width: int) -> str:
    """A horizontal bar as fine as an eighth of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8) if math.isfinite(share) else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of numbers between 0 and 1 in a few characters, each the mean of its stretch."""
    width = min(width, len(values))
    parts = [values[at * len(values) // width : (at + 1) * len(values) // width] for at in range(width)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * sum(part) / len(part))))] for part in parts)


def _fit(column: Column, value: float) -> str:
    if not math.isfinite(value):
        return str(value).rjust(column.width)
    said = column.form(value)
    return (said if len(said) <= column.width else f"{value:.0e}").rjust(column.width)


def _style(column: Column, value: float) -> str:
    if not math.isfinite(value):
        return "bold red"  # nobody should overlook it
    return f"bold {_colour(value)}" if column.keys == ("reward/accuracy",) else STYLES[column.group]


def _colour(share: float) -> str:
    return "green" if share >= 2 / 3 else "yellow" if share >= 1 / 3 else "red"

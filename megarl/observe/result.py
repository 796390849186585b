"""The end of a run: a table of what came of it, and where everything lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megarl.observe.line import bar, sparkline
from megarl.observe.progress import TITLES, clock

COURSE = 32  # characters


def result_panel(summary: Mapping[str, Any], course: Sequence[float] = ()) -> RenderableType:
    """The summary (see `report.summarise`) as a table; `course`: the training accuracy of every step."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    greedy, training, seconds = summary["greedy_accuracy"], summary["training_accuracy"], summary["seconds"]
    if greedy["after"] is not None:
        table.add_row("greedy accuracy, held out", _change(greedy["before"], greedy["after"]))
    elif greedy["before"] is not None:
        table.add_row("greedy accuracy, held out", Text(f"{greedy['before']:.3f}", style="bold"))
    if training["first"] is not None:
        table.add_row("training accuracy", _training(training))
        if len(course) > 1:
            table.add_row("", Text(sparkline(course, COURSE), style="green"))
    if seconds["step_mean"] is not None:
        table.add_row("seconds a step", _seconds(summary))
        for name, each in sorted(seconds["by_stage"].items(), key=lambda pair: -pair[1]):
            if seconds["share"].get(name, 0.0) >= 0.005:
                table.add_row(f"  {TITLES.get(name, name)}", _stage(each, seconds["share"][name]))
    if summary["mismatch"]["abs_mean"] is not None:
        table.add_row("log-probs, trainer − engine", _mismatch(summary))
    title = Text(f" {summary['steps']} steps ", style="bold")
    return Panel(
        table, title=title, title_align="left", border_style="green", box=box.ROUNDED, padding=(1, 2), expand=False
    )


def places_list(places: Sequence[tuple[str, Path | str]]) -> list[Text]:
    """Where everything lies, a line each: (what it is, path)."""
    width = max((len(what) for what, _ in places), default=0)
    return [Text.assemble((f"  {what.ljust(width)}  ", "dim"), (str(path), "cyan")) for what, path in places]


def _change(before: float, after: float) -> Text:
    colour = "green" if after > before else "red" if after < before else "yellow"
    return Text.assemble(f"{before:.3f} → ", (f"{after:.3f}", f"bold {colour}"), (f"   {after - before:+.3f}", colour))


def _training(training: Mapping[str, Any]) -> Text:
    return Text.assemble(
        f"{training['first']:.3f} ", (f"first {training['first_steps']}", "dim"), " → ",
        (f"{training['last']:.3f} ", "bold"), (f"last {training['last_steps']}", "dim"),
        (f"   best {training['last_steps']} in a row ", "dim"), f"{training['best']:.3f}",
    )  # fmt: skip


def _seconds(summary: Mapping[str, Any]) -> Text:
    seconds, speed = summary["seconds"], summary["tokens_per_second"]
    text = Text.assemble((f"{seconds['step_mean']:.2f}", "bold"), (f"   median {seconds['step_median']:.2f}", "dim"),
                         (f"   all steps {clock(seconds['whole'])}", "dim"))  # fmt: skip
    return text.append(f"   {speed:,.0f} tokens/s", style="dim") if speed is not None else text


def _stage(seconds: float, share: float) -> Text:
    return Text.assemble((bar(share, 20), "cyan"), f" {seconds:6.2f} s", (f"  {100 * share:3.0f}%", "dim"))


def _mismatch(summary: Mapping[str, Any]) -> Text:
    mismatch, verified = summary["mismatch"], summary["reshards_verified"]
    text = Text(f"mean {mismatch['abs_mean']:.1e}   largest {mismatch['abs_max']:.1e}")
    return text.append("   every sync verified", style="green") if verified else text

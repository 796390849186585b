"""The learning curve as a picture, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.observe.files import write_whole

WINDOW = 5  # steps of the moving mean


def draw_curve(metrics: Mapping[str, Sequence[float]], path: Path, title: str) -> bool:
    """Write the training accuracy (each step and a moving mean) and the greedy accuracy to a PNG. False: not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, no global state
    from matplotlib.figure import Figure

    steps = metrics.get("step", [])
    training, greedy = (
        _points(steps, metrics.get("reward/accuracy", [])),
        _points(steps, metrics.get("eval/accuracy", [])),
    )
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), "o", color="#9ecae1", markersize=4, label="training, each step")
        axes.plot(
            *zip(*_smooth(training), strict=True),
            color="#2171b5",
            linewidth=2,
            label=f"training, mean of {WINDOW} steps",
        )
    if greedy:
        axes.plot(*zip(*greedy, strict=True), "D--", color="#d94801", markersize=7, label="held out, greedy")
    axes.set(xlabel="step", ylabel="accuracy", ylim=(-0.02, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if training or greedy:
        axes.legend(loc="best", frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(path, picture.getvalue())
    return True


def _points(steps: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    return [(step, value) for step, value in zip(steps, values, strict=False) if not math.isnan(value)]


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    values = [value for _, value in points]
    means = [
        sum(values[max(0, at - WINDOW + 1) : at + 1]) / len(values[max(0, at - WINDOW + 1) : at + 1])
        for at in range(len(values))
    ]
    return [(step, mean) for (step, _), mean in zip(points, means, strict=True)]

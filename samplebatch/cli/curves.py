"""Plots of the learning curves of a training log, for the terminal and as image files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.cli.terminal import console, number, say
from samplebatch.errors import require
from samplebatch.loggers.training_log import LearningCurve, learning_curves, newest_metrics
from samplebatch.names import for_matplotlib, for_rich, for_terminal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG = "log"
"""Name of the log in the folder of a run."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT = 60, 10
_POINTS = 12
_NUMBER_WIDTH = 9
"""Width of any number with four digits; in a narrow terminal, names of metrics are wrapped."""
_MAX_PANELS = 8
_MEAN, _STD = "returns_stat/mean", "returns_stat/std"
_RETURNS = (f"test/{_MEAN}", f"training/{_MEAN}")
_MAX_POLICIES = 10
"""Maximum number of policies with their own curves of returns: the number of colours."""
FACTS = ("info/", "update/smoothed_loss/", "update/train_time", "training/collect_", "test/collect_")
"""Prefixes of metrics that do not measure learning."""
_OF_POLICY = re.compile(r"(test|training)/policies/(.+)/returns_stat/mean|update/by_policy/(.+?)/(.+)")
"""Names of metrics of one of several policies."""
_SUMMARY = ("std", "min", "max", "low", "high")
"""Last parts of names of metrics that accompany a mean."""

Curves = Mapping[str, LearningCurve]


def show_curves(log: SampleBatch) -> None:
    """Print the curve of returns as a plot, and all other curves as rows of a table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    curves = learning_curves(newest_metrics(log))
    for name in [name for name in _RETURNS if name in curves][:1]:
        for line in draw_text(name, curves[name]):
            say(line)
    table = Table(title=f"{len(curves)} learning curves", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.pad_edge, table.padding = False, 0
    table.add_column("metric", overflow="fold")
    for heading in ("step", "first", "last", "largest"):
        width = None if heading == "step" else _NUMBER_WIDTH
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    table.add_column("", no_wrap=True, min_width=_POINTS)
    for name, (_, steps, values) in curves.items():
        finite = values[np.isfinite(values)]
        cells = [number(float(value)) for value in (values[0], values[-1], finite.max() if len(finite) else np.nan)]
        table.add_row(for_rich(name), str(int(steps[-1])), *cells, blocks(values))
    console().print(table)


def blocks(values: npt.NDArray[np.float64], width: int = _POINTS) -> str:
    """Plot numbers as a line of block characters; if there are more than `width` numbers, neighbours are averaged.

    >>> blocks(np.array([0.0, 1.0, 2.0, 7.0]))
    '▁▂▃█'
    """
    means = _means(values[np.isfinite(values)], width)
    if not len(means):
        return ""
    minimum, span = means.min(), np.ptp(means) or 1.0
    levels = ((means - minimum) / span * (len(_BLOCKS) - 1)).round().astype(int)
    return "".join(_BLOCKS[level] for level in levels.tolist())


def draw_text(name: str, curve: LearningCurve, width: int = _WIDTH, height: int = _HEIGHT) -> list[str]:
    """Plot a learning curve over its steps with text characters; the value axis spans the plotted values.

    >>> curve = LearningCurve("env_step", np.array([0, 10, 20]), np.array([1.0, 2.0, 3.0]))
    >>> for line in draw_text("return", curve, width=5, height=3):
    ...     print(line)
    return over env_step
           3 ┤    •
             │  •
           1 ┤•
             └─────
              0  20
    """
    is_finite = np.isfinite(curve.values)
    steps, values = curve.steps[is_finite], curve.values[is_finite]
    if not len(values):
        return [f"{for_terminal(name)} over {for_terminal(curve.unit)}: no finite values"]
    columns = _quantize(steps.astype(np.float64), width)
    means = np.bincount(columns, values, minlength=width) / np.maximum(np.bincount(columns, minlength=width), 1)
    filled = np.unique(columns)
    rows = _quantize(means[filled], height)
    grid = np.full((height, width), " ")
    grid[height - 1 - rows, filled] = "•"
    labels = {0: number(float(means[filled].max())), height - 1: number(float(means[filled].min()))}
    lines = [f"{for_terminal(name)} over {for_terminal(curve.unit)}"]
    for index, row in enumerate(grid):
        label = labels.get(index, "")
        lines.append(f"{label:>12} {'┤' if label else '│'}{''.join(row)}".rstrip())
    first, last = str(int(steps[0])), str(int(steps[-1]))
    return [*lines, " " * 13 + "└" + "─" * width, " " * 14 + first + last.rjust(width - len(first))]


def draw_curves(log: SampleBatch, path: str | os.PathLike[str]) -> None:
    """Write a plot of a log's learning curves to a file: test and training returns, and update metrics per policy."""
    _figure(learning_curves(newest_metrics(log))).savefig(path)


def as_svg(draw: Callable[[], Figure]) -> str:
    """Render a figure as SVG for a page, with searchable text in the reader's font."""
    matplotlib = require("matplotlib", "plot")
    page = BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw().savefig(page, format="svg", metadata={"Date": None})
    text = page.getvalue().decode()
    return text[text.index("<svg") :]


def curves_as_svg(log: SampleBatch) -> str:
    """Render the plot of `draw_curves` as SVG."""
    return as_svg(lambda: _figure(learning_curves(newest_metrics(log))))


def _figure(curves: Curves) -> Figure:
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    panels = dict(list(_panels(curves).items())[: _MAX_PANELS - 1])
    figure = Figure(figsize=(10, 3.4 + 1.8 * ((len(panels) + 1) // 2)), layout="constrained", dpi=120)
    grid = figure.add_gridspec(1 + (len(panels) + 1) // 2, 2, height_ratios=[1.8, *[1] * ((len(panels) + 1) // 2)])
    axes = figure.add_subplot(grid[0, :])
    is_over_seeds = any(f"{name}/low" in curves for name in _RETURNS)
    title = "mean return, and 95 % interval over seeds" if is_over_seeds else "mean return"
    axes.set_title(title, loc="left", fontsize="medium")
    for color, (label, name) in enumerate(_returns(curves).items()):
        _draw_return(axes, curves, name, label, f"C{color % 10}")
        axes.set_xlabel(for_matplotlib(curves[name].unit))
    if axes.lines:
        axes.legend(frameon=False)
    for index, (title, names) in enumerate(panels.items()):
        panel = figure.add_subplot(grid[1 + index // 2, index % 2])
        for label, name in names.items():
            panel.plot(curves[name].steps, curves[name].values, linewidth=0.9, label=for_matplotlib(label))
            _fill_interval(panel, curves, name, panel.lines[-1].get_color())
            panel.set_xlabel(for_matplotlib(curves[name].unit))
        panel.set_title(for_matplotlib(title), loc="left", fontsize="medium")
        if len(names) > 1:
            panel.legend(frameon=False, fontsize="small")
    return figure


def _returns(curves: Curves) -> dict[str, str]:
    """Map plot labels to names of return curves: one per policy, or the total return and its interquartile mean."""
    names: dict[str, str] = {}
    for total in _RETURNS:
        scope = total.partition("/")[0]
        matches = [(match[2], name) for name in curves if (match := _OF_POLICY.fullmatch(name)) and match[1] == scope]
        if len(matches) > 1:
            names |= {f"{scope}, {policy}": name for policy, name in matches[:_MAX_POLICIES]}
        elif total in curves:
            names[scope] = total
            if f"{total}/iqm" in curves:
                names[f"{scope}, interquartile mean"] = f"{total}/iqm"
    return names


def _draw_return(axes: Axes, curves: Curves, name: str, label: str, color: str) -> None:
    _, steps, values = curves[name]
    marker = "o" if len(steps) < 40 else ""
    axes.plot(steps, values, color=color, label=for_matplotlib(label), marker=marker, markersize=3)
    spread = curves.get(name.removesuffix("mean") + "std")
    if _fill_interval(axes, curves, name, color) or spread is None or len(spread.values) != len(values):
        return
    low, high = values - spread.values, values + spread.values
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def _fill_interval(axes: Axes, curves: Curves, name: str, color: Any) -> bool:
    low, high = (curves.get(f"{name}/{end}") for end in ("low", "high"))
    if low is None or high is None:
        return False
    axes.fill_between(low.steps, low.values, high.values, color=color, alpha=0.2, linewidth=0)
    return True


def _panels(curves: Curves) -> dict[str, dict[str, str]]:
    """Group update metrics into plots: a mapping from plot title to metric names by policy id.

    The policy id is empty if there is only one policy.
    """
    panels: dict[str, dict[str, str]] = {}
    for name in curves:
        if name.startswith("update/") and not name.startswith(FACTS) and name.rpartition("/")[2] not in _SUMMARY:
            match = _OF_POLICY.fullmatch(name)
            policy, metric = (match[3], match[4]) if match else ("", name.removeprefix("update/"))
            if metric not in ("train_time", "gradient_steps"):
                panels.setdefault(metric.removesuffix("/mean"), {})[policy] = name
    return panels


def _means(values: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    if len(values) <= width:
        return values
    edges = np.linspace(0, len(values), width + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(values)))
    means: npt.NDArray[np.float64] = np.add.reduceat(values, edges) / counts
    return means


def _quantize(values: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    span = float(np.ptp(values)) or 1.0
    levels: npt.NDArray[np.int64] = ((values - values.min()) / span * (count - 1)).round().astype(np.int64)
    return levels

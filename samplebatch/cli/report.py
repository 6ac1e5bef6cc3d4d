"""Reports about a batch: a picture of its episodes, and a page with columns, statistics and that picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from io import BytesIO
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.summary import as_html, describe
from samplebatch.cli.contact_sheet import contact_sheet
from samplebatch.cli.curves import curves_as_svg
from samplebatch.errors import FormatError, require
from samplebatch.loggers.training_log import is_log
from samplebatch.names import PolicyID
from samplebatch.rollout.statistics import EpisodeStatistics, episode_statistics
from samplebatch.storage.arrow_file import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf", "jpg", "jpeg")
"""Endings of the files that a picture can be written to."""

_WINDOW = 20
"""Episodes that the line through the returns averages over."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1.5rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
svg, img { max-width: 100%; height: auto; }
figure { margin: 1.5rem 0; }
"""

_HEADINGS = ("policy", "episodes", "agent episodes", "return mean", "std", "min", "max", "length mean")


def draw_episodes(batch: SampleBatch | MultiAgentBatch, path: str | os.PathLike[str]) -> None:
    """Draw the returns and lengths of the episodes that ended in a batch, a row for each policy.

    Parameters
    ----------
    batch
        A batch with the columns that `episode_statistics` needs.
    path
        The file to write; its ending says in which format.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    FormatError
        If the batch does not tell its episodes, or the ending names no format of pictures.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> steps = SampleBatch(
    ...     eps_id=[7, 7, 8], t=[0, 1, 0], agent_index=[0, 0, 0], rewards=[1.0, 2.0, 9.0], dones=[False, True, True]
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_episodes(steps, f"{folder}/episodes.png")
    ...     Path(f"{folder}/episodes.png").read_bytes()[1:4]
    b'PNG'
    """
    check_picture(path)
    _figure(_statistics(batch)).savefig(path)


def check_picture(path: str | os.PathLike[str]) -> None:
    """See to it that a picture can be written to a path, before the work that it is to show.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    FormatError
        If the ending names no format of pictures.
    FileNotFoundError
        If the folder is not there.
    """
    require("matplotlib", "plot")
    target = Path(path)
    if target.suffix.lower().removeprefix(".") not in FORMATS:
        raise FormatError(
            f"a picture's name must end in one of {', '.join('.' + name for name in FORMATS)}, got {target.name!r}"
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(2, "No such folder", str(target.parent))


def episodes_as_svg(batch: SampleBatch | MultiAgentBatch) -> str:
    """Draw the picture of `draw_episodes` as SVG, to stand within a page; raises as that does."""
    matplotlib = require("matplotlib", "plot")
    page = BytesIO()
    # Text stays text: it can be searched, and takes the reader's font.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        _figure(_statistics(batch)).savefig(page, format="svg", metadata={"Date": None})
    text = page.getvalue().decode()
    return text[text.index("<svg") :]


def _statistics(batch: SampleBatch | MultiAgentBatch) -> EpisodeStatistics:
    statistics = episode_statistics(batch)
    if statistics is None:
        raise FormatError(
            "a picture of episodes needs the columns 'eps_id', 't', 'agent_index', 'rewards' and 'terminateds' and "
            "'truncateds' (or 'dones'), and the batch lacks one of them"
        )
    return statistics


def _figure(statistics: EpisodeStatistics) -> Figure:
    from matplotlib.figure import Figure

    policies = statistics.policies
    # Not through pyplot: that keeps figures, and may open windows.
    figure = Figure(figsize=(10, 1 + 2.6 * max(len(policies), 1)), layout="constrained", dpi=120)
    figure.suptitle(f"{statistics.episodes} episodes ended, {statistics.unfinished} did not")
    rows = figure.subplots(max(len(policies), 1), 2, squeeze=False, width_ratios=(2, 1))
    for axes, (policy, found) in zip(rows, policies.items(), strict=False):
        _draw_returns(axes[0], policy, found.returns)
        _draw_lengths(axes[1], found.lengths)
    return figure


def _draw_returns(axes: Axes, policy: PolicyID, returns: npt.NDArray[Any]) -> None:
    axes.set_title(f"{policy}: return of each episode", loc="left", fontsize="medium")
    axes.set_xlabel("episode")
    # Rewards of several parts have a line each.
    for part, values in enumerate(returns.reshape(len(returns), -1).T if len(returns) else ()):
        few = len(values) <= 2 * _WINDOW
        axes.plot(values, "o" if few else ".", alpha=0.7 if few else 0.35, markersize=4, color=f"C{part % 10}")
        mean = _running_mean(values)
        axes.plot(np.arange(len(values) - len(mean), len(values)), mean, color=f"C{part % 10}")
    _or_say_so(axes, returns)


def _draw_lengths(axes: Axes, lengths: npt.NDArray[np.int64]) -> None:
    axes.set_title("lengths", loc="left", fontsize="medium")
    axes.set_xlabel("steps")
    axes.locator_params(axis="x", integer=True)
    if len(lengths):
        shortest, longest = int(lengths.min()), int(lengths.max())
        bins = min(longest - shortest + 1, 30)
        axes.hist(lengths, bins=np.linspace(shortest - 0.5, longest + 0.5, bins + 1).tolist(), color="C0", alpha=0.8)
    _or_say_so(axes, lengths)


def _running_mean(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    window = min(_WINDOW, len(values))
    sums = np.concatenate(([0.0], values.cumsum()))
    mean: npt.NDArray[Any] = (sums[window:] - sums[:-window]) / window
    return mean


def _or_say_so(axes: Axes, values: Sequence[Any] | npt.NDArray[Any]) -> None:
    if not len(values):
        axes.text(0.5, 0.5, "no episode ended", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])


def write_html_report(batch: SampleBatch | MultiAgentBatch, path: str | os.PathLike[str], *, title: str) -> None:
    """Write a page about a batch, whole or not at all.

    It has the columns of each policy with their dtypes, shapes and ranges, frames of images, and, where the batch
    tells its episodes, their statistics and their picture. Of the log of a training it has the learning curves.

    Parameters
    ----------
    batch
        The batch.
    path
        The HTML file to write.
    title
        The page's heading.

    Raises
    ------
    MissingExtraError
        If the batch tells its episodes and matplotlib is not installed.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_html_report(SampleBatch(rewards=[1.0, 2.0]), f"{folder}/report.html", title="two steps")
    ...     "<h1>two steps</h1>" in Path(f"{folder}/report.html").read_text()
    True
    """
    page = _page(batch, title).encode()
    with replacing(path) as file:
        file.write(page)


def _page(batch: SampleBatch | MultiAgentBatch, title: str) -> str:
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(_counts(batch))}</p>"]
    statistics = episode_statistics(batch)
    if statistics is not None:
        parts += [_episodes(statistics), episodes_as_svg(batch)]
    flat = isinstance(batch, SampleBatch)
    if is_log(batch):
        parts.append(curves_as_svg(batch))
    for policy, steps in batch.as_multi_agent().policy_batches.items():
        caption = f"{len(steps)} steps" if flat else f"policy {policy}: {len(steps)} agent steps"
        columns = {name: steps.column(name) for name in steps.column_names}
        parts.append(as_html(caption, describe(columns)))
        parts += [_frames(name, sheet) for name, column in columns.items() if (sheet := contact_sheet(column))]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _frames(name: str, sheet: str) -> str:
    """Lay a contact sheet out under the name of its column."""
    return f'<figure><figcaption>{escape(name)}</figcaption><img src="{sheet}" alt="frames"></figure>'


def _counts(batch: SampleBatch | MultiAgentBatch) -> str:
    return f"{batch.env_steps()} environment steps, {batch.agent_steps()} agent steps, {batch.size_bytes()} bytes"


def _episodes(statistics: EpisodeStatistics) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    rows = []
    for policy, found in statistics.policies.items():
        returns = found.returns
        spread = (returns.std(), returns.min(), returns.max()) if returns.size else (float("nan"),) * 3
        numbers = [_number(float(value)) for value in (found.mean_return, *spread, found.mean_length)]
        cells = [str(policy), str(found.episodes), str(len(found.lengths)), *numbers]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    caption = f"{statistics.episodes} episodes ended, {statistics.unfinished} did not"
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _number(value: float) -> str:
    return "-" if isnan(value) else f"{value:.4g}"

"""Pictures of a rollout: the return of every episode, and how long episodes are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import FormatError, require
from samplebatch.rollout.statistics import EpisodeStatistics, episode_statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf", "jpg", "jpeg")
"""Endings of the files that a picture can be written to."""

_WINDOW = 20
"""Episodes that the line through the returns averages over."""


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
    """Draw what `draw_episodes` draws as SVG, to stand within a page; raises as that does."""
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


def _draw_returns(axes: Axes, policy: str, returns: npt.NDArray[Any]) -> None:
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

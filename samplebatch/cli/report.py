"""Reports about a batch: a plot of its episodes, and an HTML page with columns, statistics and the plot."""

from __future__ import annotations

import os
import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.summary import IDS, Line, as_html, describe, html_table
from samplebatch.cli.curves import as_svg, curves_as_svg
from samplebatch.cli.terminal import EPISODE_HEADINGS, episode_cells, episodes_of, megabytes, titled_steps
from samplebatch.column.interface import Column
from samplebatch.errors import FormatError, require
from samplebatch.loggers.training_log import is_log
from samplebatch.names import PolicyID, for_html, for_matplotlib
from samplebatch.rollout.statistics import EpisodeStatistics, episode_statistics
from samplebatch.storage.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FORMATS = ("png", "svg", "pdf", "jpg", "jpeg")
"""Suffixes of picture formats."""

_MAX_BARS = 30
_WINDOW = 20
"""Window of the running mean of returns, in episodes."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1.5rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
svg, img { max-width: 100%; height: auto; }
figure { margin: 1.5rem 0; }
"""


def draw_episodes(batch: SampleBatch | MultiAgentBatch, path: str | os.PathLike[str]) -> None:
    """Plot the returns and lengths of completed episodes in a batch, with one row of plots per policy.

    >>> import tempfile
    >>> steps = SampleBatch(
    ...     eps_id=[7, 7, 8],
    ...     t=[0, 1, 0],
    ...     agent_index=[0, 0, 0],
    ...     rewards=[1.0, 2.0, 9.0],
    ...     dones=[False, True, True],
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_episodes(steps, f"{folder}/episodes.png")
    ...     Path(f"{folder}/episodes.png").read_bytes()[1:4]
    b'PNG'
    """
    check_picture(path)
    _figure(_statistics(batch)).savefig(path)


def check_picture(path: str | os.PathLike[str]) -> None:
    """Check that a plot can be written to a path; called before a long computation."""
    require("matplotlib", "plot")
    target = Path(path)
    if target.suffix.lower().removeprefix(".") not in FORMATS:
        raise FormatError(
            f"a picture's name must end in one of {', '.join('.' + name for name in FORMATS)}, got {target.name!r}"
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(2, "No such folder", str(target.parent))


def episodes_as_svg(batch: SampleBatch | MultiAgentBatch) -> str:
    """Render the plot of `draw_episodes` as SVG."""
    return as_svg(lambda: _figure(_statistics(batch)))


def _statistics(batch: SampleBatch | MultiAgentBatch) -> EpisodeStatistics:
    statistics = episode_statistics(batch)
    if statistics is None:
        raise FormatError(
            "a plot of episodes must have the columns 'eps_id', 't', 'agent_index', 'rewards' and 'terminateds' and "
            "'truncateds' (or 'dones'), got a batch without one"
        )
    return statistics


def _figure(statistics: EpisodeStatistics) -> Figure:
    from matplotlib.figure import Figure

    policies = statistics.policies
    # Without pyplot, which retains figures and may open windows.
    figure = Figure(figsize=(10, 1 + 2.6 * max(len(policies), 1)), layout="constrained", dpi=120)
    figure.suptitle(episodes_of(statistics))
    rows = figure.subplots(max(len(policies), 1), 2, squeeze=False, width_ratios=(2, 1))
    for axes, (policy, policy_statistics) in zip(rows, policies.items(), strict=False):
        _draw_returns(axes[0], policy, policy_statistics.returns)
        _draw_lengths(axes[1], policy_statistics.lengths)
    return figure


def _draw_returns(axes: Axes, policy: PolicyID, returns: npt.NDArray[Any]) -> None:
    axes.set_title(f"{for_matplotlib(policy)}: return of each episode", loc="left", fontsize="medium")
    axes.set_xlabel("episode")
    # Vector rewards have one line per component.
    for part, values in enumerate(returns.reshape(len(returns), -1).T if len(returns) else ()):
        few = len(values) <= 2 * _WINDOW
        axes.plot(values, "o" if few else ".", alpha=0.7 if few else 0.35, markersize=4, color=f"C{part % 10}")
        mean = _running_mean(values)
        axes.plot(np.arange(len(values) - len(mean), len(values)), mean, color=f"C{part % 10}")
    _note_if_empty(axes, returns)


def _draw_lengths(axes: Axes, lengths: npt.NDArray[np.int64]) -> None:
    axes.set_title("episodes per length", loc="left", fontsize="medium")
    axes.set_xlabel("steps")
    axes.locator_params(axis="both", integer=True)
    if len(lengths):
        shortest, width, counts = count_lengths(lengths)
        starts = shortest + width * np.arange(len(counts))
        axes.bar(starts - 0.5, counts, width, align="edge", color="C0", alpha=0.8)
        if len(counts) == 1:
            axes.set_xlim(shortest - 3, shortest + 3)
    _note_if_empty(axes, lengths)


def count_lengths(lengths: npt.NDArray[np.int64]) -> tuple[int, int, npt.NDArray[np.int64]]:
    """Compute a histogram of episode lengths: the smallest length, the bin width, and at most 30 counts.

    >>> count_lengths(np.array([3, 5, 5]))
    (3, 1, array([1, 0, 2]))
    >>> first, width, counts = count_lengths(np.array([1, 2, 100]))
    >>> width, int(counts[0]), len(counts)
    (4, 2, 25)
    """
    shortest = int(lengths.min())
    span = int(lengths.max()) - shortest + 1
    width = -(-span // _MAX_BARS)
    return shortest, width, np.bincount((lengths - shortest) // width)


def _running_mean(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    window = min(_WINDOW, len(values))
    sums = np.concatenate(([0.0], values.cumsum()))
    mean: npt.NDArray[Any] = (sums[window:] - sums[:-window]) / window
    return mean


def _note_if_empty(axes: Axes, values: Sequence[Any] | npt.NDArray[Any]) -> None:
    if not len(values):
        axes.text(0.5, 0.5, "no episode ended", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])


def write_html_report(batch: SampleBatch | MultiAgentBatch, path: str | os.PathLike[str], *, title: str) -> None:
    """Atomically write an HTML page about a batch.

    The page contains the columns of each policy with dtypes, shapes and ranges, and frames of image columns. If the
    batch has episode columns, the page also contains statistics and a plot of the episodes. For a training log, the
    page contains the learning curves.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_html_report(
    ...         SampleBatch(rewards=[1.0, 2.0]), f"{folder}/report.html", title="two steps"
    ...     )
    ...     "<h1>two steps</h1>" in Path(f"{folder}/report.html").read_text()
    True
    """
    page = _page(batch, title).encode()
    with replacing(path) as file:
        file.write(page)


def _page(batch: SampleBatch | MultiAgentBatch, title: str) -> str:
    parts = [f"<h1>{for_html(title)}</h1>", f"<p>{for_html(_counts(batch))}</p>"]
    statistics = episode_statistics(batch)
    if statistics is not None:
        rows = [[*map(for_html, cells)] for cells in episode_cells(statistics)]
        parts += [html_table(episodes_of(statistics), EPISODE_HEADINGS, rows), episodes_as_svg(batch)]
    if is_log(batch):
        parts.append(curves_as_svg(batch))
    for caption, steps in titled_steps(batch):
        columns = {name: steps.column(name) for name in steps.column_names}
        parts.append(as_html(caption, [_without_range(line) for line in describe(columns)]))
        parts += [_frames(name, sheet) for name, column in columns.items() if (sheet := contact_sheet(column))]
    head = f'<meta charset="utf-8"><title>{for_html(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _without_range(line: Line) -> Line:
    """Remove minimum, maximum and histogram of an id column, because ids are not quantities."""
    return line._replace(min="", max="", points=()) if line.column in IDS else line


def _frames(name: str, sheet: str) -> str:
    return f'<figure><figcaption>{for_html(name)}</figcaption><img src="{sheet}" alt="frames"></figure>'


def _counts(batch: SampleBatch | MultiAgentBatch) -> str:
    return f"{batch.env_steps()} environment steps, {batch.agent_steps()} agent steps, {megabytes(batch.size_bytes())}"


_MAX_FRAMES = 24
_FRAMES_A_ROW = 8
_MIN_SIDE = 8
"""Minimum side of an image in pixels; smaller rows are features."""
_GAP = 2
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def contact_sheet(column: Column) -> str:
    """Render evenly spaced frames of a column as the data URI of a PNG image; empty if the rows are not images.

    Images are rows of dtype uint8 and shape (height, width), with at most four channels as the first or last axis.
    Three channels are rendered in colour; for other numbers of channels, such as stacked frames, the last channel is
    rendered.

    >>> from samplebatch.column import as_column
    >>> contact_sheet(as_column(np.zeros((30, 16, 16, 3), np.uint8), "obs"))[:22]
    'data:image/png;base64,'
    >>> contact_sheet(as_column(np.zeros((30, 4)), "obs"))
    ''
    """
    shape = column.row_shape
    if str(column.dtype).removeprefix("torch.") != "uint8" or None in shape or not len(column):
        return ""
    channels = _channels_at(tuple(extent for extent in shape if extent is not None))
    if channels is None:
        return ""
    chosen = np.linspace(0, len(column) - 1, min(len(column), _MAX_FRAMES)).astype(np.intp)
    frames = column.take(chosen).to_numpy()
    if channels:
        frames = np.moveaxis(frames, channels, -1)
        frames = frames if frames.shape[-1] == 3 else frames[..., -1]
    return "data:image/png;base64," + b64encode(_png(_tile(frames))).decode()


def _channels_at(shape: tuple[int, ...]) -> int | None:
    """Return the channel axis of image rows; 0 if the images have no channels, None if the rows are not images."""
    if len(shape) == 2 and min(shape) >= _MIN_SIDE:
        return 0
    for axis, sides in ((3, shape[:2]), (1, shape[1:])):
        if len(shape) == 3 and min(sides) >= _MIN_SIDE and shape[axis - 1] <= 4:
            return axis
    return None


def _tile(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    n, height, width = frames.shape[:3]
    across = min(n, _FRAMES_A_ROW)
    down = -(-n // across)
    sheet = np.full((down * (height + _GAP), across * (width + _GAP), *frames.shape[3:]), 255, np.uint8)
    for index, frame in enumerate(frames):
        top, left = index // across * (height + _GAP), index % across * (width + _GAP)
        sheet[top : top + height, left : left + width] = frame
    return sheet[:-_GAP, :-_GAP]


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    height, width = image.shape[:2]
    colour = 2 if image.ndim == 3 else 0
    lines = np.zeros((height, 1 + image[0].size), np.uint8)
    lines[:, 1:] = image.reshape(height, -1)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes())),
        (b"IEND", b""),
    )
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )

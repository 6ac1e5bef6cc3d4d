"""A page about a rollout: its columns, its episodes, and their picture, in one file that needs no other."""

from __future__ import annotations

import os
from html import escape
from math import isnan

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.summary import as_html
from samplebatch.rollout.pictures import episodes_as_svg
from samplebatch.rollout.statistics import EpisodeStatistics, episode_statistics
from samplebatch.storage.arrow_file import replacing

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1.5rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
svg { max-width: 100%; height: auto; }
"""

_HEADINGS = ("policy", "episodes", "agent episodes", "return mean", "std", "min", "max", "length mean")


def write_html_report(batch: SampleBatch | MultiAgentBatch, path: str | os.PathLike[str], *, title: str) -> None:
    """Write a page about a batch, whole or not at all.

    It has the columns of each policy with their dtypes, shapes and ranges, and, where the batch tells its episodes,
    their statistics and their picture.

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
    >>> from pathlib import Path
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
    for policy, steps in batch.as_multi_agent().policy_batches.items():
        caption = f"{len(steps)} steps" if flat else f"policy {policy}: {len(steps)} agent steps"
        parts.append(as_html(caption, {name: steps.column(name) for name in steps.column_names}))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _counts(batch: SampleBatch | MultiAgentBatch) -> str:
    return f"{batch.env_steps()} environment steps, {batch.agent_steps()} agent steps, {batch.size_bytes()} bytes"


def _episodes(statistics: EpisodeStatistics) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    rows = []
    for policy, found in statistics.policies.items():
        returns = found.returns
        spread = (returns.std(), returns.min(), returns.max()) if returns.size else (float("nan"),) * 3
        numbers = [_number(float(value)) for value in (found.mean_return, *spread, found.mean_length)]
        cells = [policy, str(found.episodes), str(len(found.lengths)), *numbers]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    caption = f"{statistics.episodes} episodes ended, {statistics.unfinished} did not"
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _number(value: float) -> str:
    return "-" if isnan(value) else f"{value:.4g}"

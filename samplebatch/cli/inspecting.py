"""`samplebatch inspect` and `samplebatch verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.summary import Line, describe
from samplebatch.cli.collecting import read_any
from samplebatch.cli.curves import LOG, draw_curves, show_curves
from samplebatch.cli.report import check_picture, draw_episodes, write_html_report
from samplebatch.cli.terminal import FAILED, complain, megabytes, say, show_columns, show_episodes, show_table
from samplebatch.loggers.training_log import is_log
from samplebatch.names import for_terminal
from samplebatch.rollout.statistics import episode_statistics
from samplebatch.storage import saving


def inspect(file: Path, *, plot: Path | None = None, html: Path | None = None, allow_pickle: bool = False) -> int:
    """Print a file's columns and episodes, plot them and write a page, and return the exit status.

    For a training log, or the folder of a run, print and plot the learning curves.
    """
    if plot is not None:
        check_picture(plot)
    batch = read_any(file / LOG if (file / LOG).is_dir() else file, allow_pickle=allow_pickle)
    if is_log(batch):
        show_curves(batch)
    else:
        show_columns(batch)
        show_episodes(episode_statistics(batch))
    if plot is not None:
        if is_log(batch):
            draw_curves(batch, plot)
        else:
            draw_episodes(batch, plot)
        say(f"Drew {plot}")
    if html is not None:
        write_html_report(batch, html, title=file.name)
        say(f"Wrote {html}")
    return 0


def compare(first: Path, second: Path, *, allow_pickle: bool = False) -> int:
    """Compare two files column by column for each policy, and return the exit status."""
    sides = [read_any(path, allow_pickle=allow_pickle) for path in (first, second)]
    policies = [side.as_multi_agent().policy_batches for side in sides]
    for path, side in zip((first, second), sides, strict=True):
        say(f"{path}: {side.env_steps()} environment steps, {side.agent_steps()} agent steps")
    same = True
    for policy in dict.fromkeys([*policies[0], *policies[1]]):
        left, right = (batches.get(policy, SampleBatch()) for batches in policies)
        same &= _show(policy, left, right, flat=all(isinstance(side, SampleBatch) for side in sides))
    say("The files hold the same." if same else "The files differ.")
    return 0


def _show(policy: Any, left: SampleBatch, right: SampleBatch, *, flat: bool) -> bool:
    """Print the columns of one policy in both files; return whether they are equal."""
    verdicts = {name: _verdict(name, left, right) for name in [*left.column_names, *right.column_names]}
    show_table(
        ("column", "first", "range", "mean", "second", "range", "mean", ""),
        [(name, *_cells(name, left), *_cells(name, right), verdict) for name, verdict in verdicts.items()],
        f"{'' if flat else f'policy {for_terminal(policy)}: '}{len(left)} and {len(right)} steps",
    )
    return set(verdicts.values()) <= {"same"} and len(left) == len(right)


def _verdict(name: str, left: SampleBatch, right: SampleBatch) -> str:
    if name not in left.column_names or name not in right.column_names:
        return "only in the first" if name in left.column_names else "only in the second"
    mine, theirs = left.column(name), right.column(name)
    if (str(mine.dtype), mine.row_shape) != (str(theirs.dtype), theirs.row_shape):
        return "another type"
    return "same" if mine.equals(theirs) else "other values"


def _cells(name: str, batch: SampleBatch) -> tuple[str, str, str]:
    line = Line("", "", "")
    if name in batch.column_names:
        (line,) = describe({name: batch.column(name)})
    return f"{line.dtype} {line.shape}".strip(), f"{line.min} to {line.max}" if line.min else "", line.mean


def verify(path: Path) -> int:
    """Print for each file whether it is intact; return the exit status, 1 if a file is damaged."""
    reports = saving.verify(path)
    rows = []
    for report in reports:
        name = report.path.relative_to(path) if report.path != path else path.name
        intact = "whole" if report.has_checksums else "readable; it has no checksums"
        rows.append((name, report.format, megabytes(report.nbytes), "damaged" if report.fault else intact))
    show_table(("file", "format", "size", "found"), rows, right=("size",))
    faults = [report.fault for report in reports if report.fault]
    if faults:
        complain(faults[0] + (f"; {len(faults) - 1} more files are damaged" if faults[1:] else ""))
    return FAILED if faults else 0

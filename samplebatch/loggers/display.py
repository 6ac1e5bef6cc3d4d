"""Displays: how a training shows its progress, as a bar where rich and a terminal are there, else as plain lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from samplebatch.errors import require
from samplebatch.loggers.figures import short


class Display:
    """Plain lines on standard output, for trainers; the base of other displays.

    Parameters
    ----------
    verbose
        Whether there are lines at all.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose

    def begin(self, epoch: int, done: int, total: int) -> None:
        """Begin to show an epoch."""

    def advance(self, done: int, figures: Mapping[str, Any]) -> None:
        """Show how many steps of the epoch are done, and its newest figures."""

    def close(self) -> None:
        """Leave the terminal as it was."""

    def say(self, line: str) -> None:
        """Print a line."""
        if self._verbose:
            print(line, flush=True)


class Bar(Display):
    """Bar of the epoch's steps with the newest figures beside it, drawn by rich."""

    def __init__(self, *, verbose: bool) -> None:
        super().__init__(verbose=verbose)
        rich = require("rich.progress", "cli")
        columns = (
            rich.TextColumn("epoch {task.fields[epoch]}"),
            rich.BarColumn(bar_width=None),
            rich.TextColumn("{task.completed}/{task.total}  {task.fields[figures]}"),
            rich.TimeRemainingColumn(),
        )
        self._progress = rich.Progress(*columns, transient=True)
        self._task: Any = None

    def begin(self, epoch: int, done: int, total: int) -> None:
        """Begin the bar of an epoch in place of the one before."""
        self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task("", total=total, completed=done, epoch=epoch, figures="")

    def advance(self, done: int, figures: Mapping[str, Any]) -> None:
        """Bring bar and figures up to date."""
        shown = ", ".join(f"{name} {short(value)}" for name, value in figures.items())
        self._progress.update(self._task, completed=done, figures=shown)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._verbose:
            self._progress.console.print(line, highlight=False, markup=False)


def make_display(*, verbose: bool, show_progress: bool) -> Display:
    """Make a bar if it is wanted and can be seen, else plain lines."""
    if show_progress and sys.stdout.isatty() and find_spec("rich") is not None:
        return Bar(verbose=verbose)
    return Display(verbose=verbose)

"""`samplebatch inspect`."""

from __future__ import annotations

from pathlib import Path

from samplebatch.cli.destination import read_any
from samplebatch.cli.display import say, show_columns, show_episodes
from samplebatch.cli.report import check_picture, draw_episodes, write_html_report
from samplebatch.rollout.statistics import episode_statistics


def inspect(file: Path, *, plot: Path | None = None, html: Path | None = None, allow_pickle: bool = False) -> int:
    """Print a file's columns and episodes, draw them and write a page about them, and return the exit status."""
    if plot is not None:
        check_picture(plot)
    batch = read_any(file, allow_pickle=allow_pickle)
    show_columns(batch)
    show_episodes(episode_statistics(batch))
    if plot is not None:
        draw_episodes(batch, plot)
        say(f"Drew {plot}")
    if html is not None:
        write_html_report(batch, html, title=file.name)
        say(f"Wrote {html}")
    return 0

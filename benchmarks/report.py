"""Output of outcomes as a terminal table, Markdown or JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.harness import Outcome

HEADINGS = ("work", "ours us", "rllib us", "fastest peer us", "bare us", "ours/peer", "ours/bare", "verdict")
PACKAGES = (
    "samplebatch",
    "numpy",
    "pyarrow",
    "ray",
    "tianshou",
    "stable-baselines3",
    "cpprb",
    "tensordict",
    "torch",
    "lz4",
)


def microseconds(value: float | None) -> str:
    """Format a time in microseconds, with about three digits.

    >>> [microseconds(v) for v in (0.1234, 45.67, 12345.6, None)]
    ['0.12', '45.7', '12346', '-']
    """
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def ratio(value: float | None) -> str:
    """Format a ratio; None is a dash.

    >>> ratio(0.4567), ratio(None)
    ('0.46', '-')
    """
    return "-" if value is None else f"{value:.2f}"


def cells(outcome: Outcome) -> tuple[str, ...]:
    """Format an outcome as one cell per heading in `HEADINGS`."""
    peer = outcome.fastest_peer
    return (
        outcome.row.name,
        microseconds(outcome.ours),
        microseconds(outcome.us.get("rllib")),
        "-" if peer is None else f"{peer} {microseconds(outcome.us[peer])}",
        microseconds(outcome.bare),
        ratio(outcome.ratio_to(peer)),
        ratio(outcome.ratio_to("bare")),
        outcome.verdict,
    )


def setting() -> str:
    """Describe the versions of Python and packages, and the number of cores."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"Python {platform.python_version()}, {', '.join(versions)}; {cores} {'core' if cores == 1 else 'cores'}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Count the rows that meet their target."""
    met = sum(outcome.ours is not None and not outcome.misses for outcome in outcomes)
    return f"{met} of {len(outcomes)} rows meet their target"


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Format outcomes as a Markdown table."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|" + "---:|" * (len(HEADINGS) - 2) + "---|"]
    for outcome in outcomes:
        first, *other_cells = cells(outcome)
        lines.append("| " + " | ".join([f"`{first}`", *other_cells]) + " |")
    return "\n".join([*lines, "", f"{summary(outcomes)}. {setting()}."])


def show(outcomes: Sequence[Outcome]) -> None:
    """Print outcomes as a table, in colour if rich is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _show_plainly(outcomes)
        return
    table = Table(caption=setting())
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("work", "verdict") else "right", no_wrap=True)
    for outcome in outcomes:
        *values, verdict = cells(outcome)
        table.add_row(*values, f"[{'green' if verdict == 'met' else 'yellow'}]{verdict}[/]")
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    console.print(summary(outcomes))


def _show_plainly(outcomes: Sequence[Outcome]) -> None:
    grid = [HEADINGS, *map(cells, outcomes)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    for name, *numbers, verdict in grid:
        middle = "  ".join(cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True))
        print(f"{name.ljust(widths[0])}  {middle}  {verdict}")
    print(f"{summary(outcomes)}. {setting()}.")


def write_json(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the medians of all contestants and the verdicts of all rows to a JSON file."""
    rows = [{"work": o.row.name, "us": o.us, "fastest_peer": o.fastest_peer, "verdict": o.verdict} for o in outcomes]
    path.write_text(json.dumps({"setting": setting(), "rows": rows}, indent=2) + "\n")

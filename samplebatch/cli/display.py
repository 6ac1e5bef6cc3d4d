"""Output of the command: tables, one-sentence complaints, and numbers for people."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from samplebatch.batch.multi_agent import MultiAgentBatch
    from samplebatch.batch.sample_batch import SampleBatch
    from samplebatch.rollout.statistics import EpisodeStatistics

_HEADINGS = ("episodes", "agent episodes", "mean return", "std", "min", "max", "mean length")


def console(*, stderr: bool = False) -> Console:
    """Make a console on standard output, or on standard error."""
    from rich.console import Console

    return Console(stderr=stderr)


def complain(sentence: str) -> None:
    """Print an error as one sentence on standard error."""
    from rich.text import Text

    console(stderr=True).print(Text.assemble(("Error: ", "bold red"), sentence), soft_wrap=True)


def say(sentence: str, *, stderr: bool = False) -> None:
    """Print a sentence of any length as it is."""
    console(stderr=stderr).print(sentence, highlight=False, markup=False, soft_wrap=True)


def show_columns(batch: SampleBatch | MultiAgentBatch) -> None:
    """Print each policy's columns."""
    from rich.table import Table

    from samplebatch.batch.sample_batch import SampleBatch
    from samplebatch.batch.summary import HEADINGS, describe

    flat = isinstance(batch, SampleBatch)
    for policy, steps in batch.as_multi_agent().policy_batches.items():
        title = f"{len(steps)} steps" if flat else f"policy {policy}: {len(steps)} agent steps"
        table = Table(title=title, title_justify="left", title_style="bold")
        for heading in HEADINGS:
            table.add_column(heading, justify="right" if heading in ("min", "max", "mean") else "left")
        for line in describe({name: steps.column(name) for name in steps.column_names}):
            table.add_row(*(getattr(line, heading) for heading in HEADINGS))
        console().print(table)


def show_episodes(statistics: EpisodeStatistics | None) -> None:
    """Print how episodes went, where that is known."""
    from rich.table import Table

    if statistics is None:
        return
    table = Table(
        title=f"{statistics.episodes} episodes ended, {statistics.unfinished} did not",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("policy")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for policy, found in statistics.policies.items():
        returns = found.returns
        spread = (returns.std(), returns.min(), returns.max()) if returns.size else (float("nan"),) * 3
        numbers = map(number, (found.mean_return, *map(float, spread), found.mean_length))
        table.add_row(str(policy), str(found.episodes), str(len(found.lengths)), *numbers)
    console().print(table)


def number(value: float) -> str:
    """Write a number with four digits, and none as a dash.

    >>> number(12.3456), number(float("nan"))
    ('12.35', '-')
    """
    return "-" if isnan(value) else f"{value:.4g}"


def megabytes(nbytes: int) -> str:
    """Write a size.

    >>> megabytes(1_234_567)
    '1.23 MB'
    """
    return f"{nbytes / 1e6:.2f} MB"

"""The notes of the processes of a soak, and how the rows of a table are held against them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 50
"""Steps of a fragment."""


def note(path: Path, *values: Any) -> None:
    """Append a line with the time to a file without buffering, because the writer may be killed at any time."""
    line = " ".join(map(str, (time.monotonic(), *values))) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def notes(path: Path) -> list[list[float]]:
    """Read the lines of a log."""
    return [[float(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def heard_at(lines: list[list[float]], step: int) -> float:
    """Return when a writer received the acknowledgement of a step; infinity if it never did."""
    return next((moment for moment, _, acknowledged, _ in lines if acknowledged > step), np.inf)


def rate(paths: Iterable[Path], column: int, spans: list[tuple[float, float]]) -> float:
    """Return the growth per second of a number in the logs of all processes within time spans."""
    grown = 0.0
    if not spans:
        return grown
    for path in paths:
        lines = np.array(notes(path))
        if len(lines):
            start, stop = (
                np.interp(np.array(ends), lines[:, 0], lines[:, column]) for ends in zip(*spans, strict=True)
            )
            grown += float((stop - start).sum())
    return round(grown / sum(stop - start for start, stop in spans), 1)


def account(
    lines: list[list[float]],
    counted: Any,
    losses: list[tuple[float, float]],
    kills: list[float],
    removed: float = -np.inf,
) -> tuple[list[str], Counter[str]]:
    """Compare the rows of one writer with its log.

    Parameters
    ----------
    lines
        Time at which a fragment was sent, the number of rows up to its end, the number of acknowledged rows, and the
        number of opened streams.
    counted
        Number of occurrences of each row in the table.
    losses
        Time spans in which acknowledged rows may have been lost.
    kills
        Times at which the service was killed.
    removed
        Time at which the oldest fragment of a full ring was acknowledged; overwritten fragments were sent earlier.
    """
    faults, sums = [], Counter[str]()
    fragments = int(lines[-1][1]) // STEPS
    if len(counted) > fragments * STEPS:
        faults.append(f"row {len(counted) - 1} was never sent")
    times = np.zeros((fragments, STEPS), np.int64)
    times.reshape(-1)[: len(counted)] = counted[: times.size]
    acknowledged = 0
    received = np.full(fragments, np.inf)
    sent = np.full(fragments, np.inf)
    for moment, rows, known, _ in lines:
        if not rows:
            # The writer was ended before its first fragment.
            continue
        sent[int(rows) // STEPS - 1] = min(moment, sent[int(rows) // STEPS - 1])
        received[acknowledged : int(known) // STEPS] = moment
        acknowledged = int(known) // STEPS
    for fragment in np.flatnonzero((times != times[:, :1]).any(1)):
        faults.append(f"fragment {fragment} is there in part")
    often = times[:, 0]
    missing = (often == 0) & np.isfinite(received)
    # None that is newer than one that is there.
    written_over = missing & (sent <= removed) & (np.cumsum(often) == 0)
    for fragment in np.flatnonzero(missing & ~written_over):
        if not any(since <= received[fragment] <= noted_at(lines, kill) for since, kill in losses):
            faults.append(f"fragment {fragment}, sent at {sent[fragment]:.2f}, is lost")
    for fragment in np.flatnonzero(often > 1):
        if not any(sent[fragment] <= kill <= received[fragment] for kill in kills):
            faults.append(f"fragment {fragment}, sent at {sent[fragment]:.2f}, is there {often[fragment]} times")
    sums.update(
        {
            "sent": fragments * STEPS,
            "acknowledged": acknowledged * STEPS,
            "acknowledged and written over": STEPS * int(np.count_nonzero(written_over)),
            "acknowledged and lost": STEPS * int(np.count_nonzero(missing & ~written_over)),
            "twice": STEPS * int(np.count_nonzero(often > 1)),
            "not acknowledged and there": STEPS * int(np.count_nonzero((often > 0) & np.isinf(received))),
        }
    )
    return faults, sums


def noted_at(lines: list[list[float]], kill: float) -> float:
    """Return when a writer had logged all fragments that were acknowledged before a kill.

    The writer may read such acknowledgements until it opens another stream, which its next line reports.
    """
    before = [streams for moment, _, _, streams in lines if moment <= kill]
    return next((moment for moment, _, _, streams in lines if moment > kill and [streams] != before[-1:]), np.inf)

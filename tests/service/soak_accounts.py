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
    """Append a line with the time to a file, at once: whoever writes may be killed at any moment."""
    line = " ".join(map(str, (time.monotonic(), *values))) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def notes(path: Path) -> list[list[float]]:
    """Read the lines of a file."""
    return [[float(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def heard_at(lines: list[list[float]], step: int) -> float:
    """Return when a writer knew that a step was acknowledged; infinity if it never did."""
    return next((moment for moment, _, acknowledged, _ in lines if acknowledged > step), np.inf)


def rate(paths: Iterable[Path], column: int, spans: list[tuple[float, float]]) -> float:
    """Return by how much a number in the notes of processes has grown a second in spans of time, of all together."""
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
    """Hold the rows of one writer against its notes.

    Parameters
    ----------
    lines
        When a fragment was sent, the number of rows up to its end, how many were known to be acknowledged, and how
        many streams had been opened.
    counted
        How often each of its rows is in the table.
    losses
        Spans of time in which acknowledged rows may have been lost.
    kills
        When the service was killed.
    removed
        When the oldest fragment of a full ring had been acknowledged: those written over were sent before.
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
    """Return when a writer had noted all that was acknowledged before a kill.

    It may read such acknowledgements until it opens another stream, which its next line tells.
    """
    before = [streams for moment, _, _, streams in lines if moment <= kill]
    return next((moment for moment, _, _, streams in lines if moment > kill and [streams] != before[-1:]), np.inf)

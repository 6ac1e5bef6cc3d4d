"""Child processes of the tests of shared counters."""

from __future__ import annotations

from samplebatch.transport.region import Region, SharedCounters


def answer(observed: Region, written: Region) -> None:
    """Copy every value of the first word to the second word."""
    requested, answered = SharedCounters(observed.array, 2), SharedCounters(written.array, 2)
    for turn in range(1, 101):
        while requested[0] != turn:
            requested.wait(0, last_value=turn - 1, timeout_s=30)
        answered[1] = turn
        answered.wake(1)

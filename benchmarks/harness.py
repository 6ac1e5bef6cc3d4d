"""Rows of work, the ways of doing each, and the clock.

A `Row` names some work and declares how each contestant does it. `measure` sets all contestants up, checks that they
agree on the result, and times them alternately: one sample of each per round, in rotating order, so that a drifting
machine speed favours no contestant. A sample is a number of calls that is long enough to time. A pause and an untimed
call precede each sample, so that no contestant pays for caches and still spinning threads of the previous one. The
medians of the samples are reported. The garbage collector is disabled while the clock runs. Each call includes one
Python function call besides the work (some 40 ns, equal for all), as in a user's loop.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from statistics import median
from time import perf_counter, sleep
from typing import Any

from benchmarks.compare import differs, plain
from benchmarks.peers import BARE, OURS, library

TRAFFIC_US = 300
"""Time from which the stricter bar applies to rows that move memory."""

TRAFFIC_BAR = 1.15
PYTHON_BAR = 2.5


@dataclass(frozen=True)
class Way:
    """One way of doing a row's work.

    Attributes
    ----------
    setup
        Creates the argument of the calls from a library and the row's data. Not timed.
    call
        The work, a function of the result of `setup`. Its result is dropped before the next call.
    fresh
        For work that changes its argument: creates the argument of each call from the result of `setup`. Not timed.
    clocked
        Whether `call` returns its duration in seconds instead of a result.
    quick
        Whether quick runs include the way; False for ways that start slowly, if other rows cover them.
    """

    setup: Callable[[Any, Any], Any]
    call: Callable[[Any], Any] = operator.call
    fresh: Callable[[Any], Any] | None = None
    clocked: bool = False
    quick: bool = True


@dataclass(frozen=True)
class Row:
    """Some work, and the ways of doing it by name of the contestant.

    Attributes
    ----------
    name
        Name of the row in the table.
    data
        Function that creates the data of all contestants.
    ways
        By contestant: `ours`, `bare`, and names of peers.
    traffic
        Whether the time is spent on moving bytes rather than on Python.
    view
        Converts a result to plain containers and arrays for comparison; None if results differ by nature.
    bar
        Acceptable multiple of the bare time, if the default bars do not apply.
    level
        Acceptable multiple of the fastest peer's time, if being faster is not the aim.
    """

    name: str
    data: Callable[[], Any]
    ways: dict[str, Way]
    traffic: bool = False
    view: Callable[[Any], Any] | None = plain
    bar: float | None = None
    level: float = 1.0

    def ways_of(self, effort: Effort) -> dict[str, Way]:
        """Return the ways that a run includes."""
        return {who: way for who, way in self.ways.items() if way.quick or effort != QUICK}

    def bar_at(self, bare_us: float) -> float:
        """Return the acceptable multiple of the bare time."""
        if self.bar is not None:
            return self.bar
        return TRAFFIC_BAR if self.traffic and bare_us > TRAFFIC_US else PYTHON_BAR


def _batch_of(library: Any, data: Any) -> Any:
    return library.batch(data)


def row(
    name: str,
    data: Callable[[], Any],
    *,
    batch: Way | Callable[[Any], Any] | None = None,
    traffic: bool = False,
    view: Callable[[Any], Any] | None = plain,
    bar: float | None = None,
    level: float = 1.0,
    **ways: Way | Callable[[Any], Any],
) -> Row:
    """Declare a row.

    Parameters
    ----------
    name, data, traffic, view, bar, level
        See `Row`.
    batch
        The way of both `ours` and `rllib`, which share an interface.
    ways
        By contestant, a `Way`, or its call, which then receives the data as the library's batch.
    """
    if batch is not None:
        ways = {"ours": batch, "rllib": batch, **ways}
    complete = {who: way if isinstance(way, Way) else Way(_batch_of, way) for who, way in ways.items()}
    return Row(name, data, complete, traffic, view, bar, level)


@dataclass(frozen=True)
class Effort:
    """Duration of a measurement.

    Attributes
    ----------
    sample_s
        Minimum duration of a sample; 0 for a single call without warm-up.
    pause_s
        Pause before a sample.
    rounds
        Samples per contestant.
    budget_s
        Seconds after which a contestant with at least five samples is not sampled any more.
    """

    sample_s: float
    pause_s: float
    rounds: int
    budget_s: float


FULL = Effort(sample_s=0.008, pause_s=0.004, rounds=41, budget_s=2.5)
QUICK = Effort(sample_s=0.0, pause_s=0.0, rounds=1, budget_s=0.0)


@dataclass
class Outcome:
    """Times of a row's contestants.

    Attributes
    ----------
    us
        Median microseconds per call, by contestant.
    """

    row: Row
    us: dict[str, float] = field(default_factory=dict)

    @property
    def ours(self) -> float | None:
        return self.us.get(OURS)

    @property
    def bare(self) -> float | None:
        return self.us.get(BARE)

    @property
    def fastest_peer(self) -> str | None:
        """Name of the fastest contestant that is neither ours nor bare NumPy."""
        peers = [who for who in self.us if who not in (OURS, BARE)]
        return min(peers, key=self.us.__getitem__, default=None)

    def ratio_to(self, who: str | None) -> float | None:
        """Return our time over a contestant's."""
        if self.ours is None or who is None or who not in self.us:
            return None
        return self.ours / self.us[who]

    @property
    def misses(self) -> list[str]:
        """Reasons why the row misses its bar; empty if the bar is met."""
        reasons = []
        peer = self.fastest_peer
        to_peer, to_bare = self.ratio_to(peer), self.ratio_to(BARE)
        if to_peer is not None and to_peer >= self.row.level:
            reasons.append(f"behind {peer}")
        if to_bare is not None and self.bare is not None and to_bare > self.row.bar_at(self.bare):
            reasons.append(f"over {self.row.bar_at(self.bare):g}x bare")
        return reasons

    @property
    def verdict(self) -> str:
        """Comparison of the row with its bar, as text."""
        return "; ".join(self.misses) or ("met" if self.ours is not None else "not measured")


class DisagreementError(AssertionError):
    """Two contestants of a row have different results."""


@dataclass
class _Contestant:
    name: str
    way: Way
    state: Any
    calls: int = 1
    spent_s: float = 0.0
    samples: list[float] = field(default_factory=list)

    def result(self) -> Any:
        argument = self.state if self.way.fresh is None else self.way.fresh(self.state)
        return self.way.call(argument)

    def time(self, calls: int) -> float:
        """Return the duration of a number of calls in seconds."""
        call, fresh, state = self.way.call, self.way.fresh, self.state
        if self.way.clocked:
            return sum(call(state) for _ in range(calls))
        if fresh is None:
            start = perf_counter()
            for _ in repeat(None, calls):
                call(state)
            return perf_counter() - start
        # Popped, not iterated: an argument that grew in a call is released before the next one grows.
        pop = [fresh(state) for _ in range(calls)].pop
        start = perf_counter()
        for _ in repeat(None, calls):
            call(pop())
        return perf_counter() - start

    def warm_up(self, sample_s: float) -> None:
        """Run until caches and pools are warm, and determine the number of calls per sample.

        The first calls, which touch new pages, may be a hundred times slower than later ones: a number of calls is
        accepted after two measurements that are long enough.
        """
        calls, seconds = 1, self.time(1)
        while seconds < sample_s or (seconds := self.time(calls)) < sample_s / 2:
            calls = max(calls + 1, min(calls * 10, int(calls * 1.2 * sample_s / max(seconds, 1e-9))))
            seconds = self.time(calls)
        self.calls = calls

    def sample(self, pause_s: float) -> None:
        sleep(pause_s)
        if self.calls > 1:
            self.time(1)
        seconds = self.time(self.calls)
        self.spent_s += seconds
        self.samples.append(seconds / self.calls)


def _check(row: Row, contestants: list[_Contestant]) -> None:
    if row.view is None or len(contestants) < 2:
        return
    by_name = {c.name: c for c in contestants}
    reference = by_name.get(BARE) or by_name.get(OURS) or contestants[0]
    expected = row.view(reference.result())
    for other in contestants:
        if other is reference:
            continue
        where = differs(row.view(other.result()), expected)
        if where is not None:
            raise DisagreementError(f"{row.name}: {other.name} and {reference.name} disagree at {where}")


def measure(row: Row, effort: Effort = FULL, only: frozenset[str] | None = None) -> Outcome:
    """Check that a row's contestants agree, and time them alternately.

    Parameters
    ----------
    row
        The row.
    effort
        Duration of the measurement.
    only
        Names of the contestants to include; None for all.

    Raises
    ------
    DisagreementError
        If two contestants have different results.
    """
    data = row.data()
    contestants = [
        _Contestant(who, way, way.setup(found, data))
        for who, way in row.ways_of(effort).items()
        if (only is None or who in only) and (found := library(who)) is not None
    ]
    _check(row, contestants)
    gc.collect()
    gc.disable()
    try:
        for contestant in contestants if effort.sample_s else ():
            contestant.warm_up(effort.sample_s)
        for turn in range(effort.rounds):
            first = turn % max(len(contestants), 1)
            for contestant in contestants[first:] + contestants[:first]:
                if contestant.spent_s < effort.budget_s or len(contestant.samples) < min(5, effort.rounds):
                    contestant.sample(effort.pause_s)
    finally:
        gc.enable()
    return Outcome(row, {c.name: median(c.samples) * 1e6 for c in contestants})

"""Declaration of benchmark rows, and measurement of their contestants.

A `Row` names a task and declares how each contestant performs the task. `measure` sets up all contestants, checks that
their results agree, and times them alternately. Each round collects one sample per contestant, in rotating order, so
that a drifting machine speed favours no contestant. A sample is a series of calls that is long enough to time. A pause
and an untimed call precede each sample, so that no contestant pays for the previous contestant's caches and spinning
threads. The medians of the samples are reported. The garbage collector is disabled during timing. Each call includes
one Python function call besides the task (about 40 ns, equal for all contestants), as in a user's loop.
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
"""Bare time in microseconds above which `TRAFFIC_BAR` applies to rows that move memory."""

TRAFFIC_BAR = 1.15
PYTHON_BAR = 2.5


@dataclass(frozen=True)
class Way:
    """Implementation of a row's task by one contestant.

    Attributes
    ----------
    setup
        Creates the argument of the calls from a library and the row's data. Not timed.
    call
        Timed function of the result of `setup`. Its result is released before the next call.
    fresh
        Required if `call` modifies its argument: creates the argument of each call from the result of `setup`. Not
        timed.
    clocked
        Whether `call` returns its duration in seconds instead of a result.
    quick
        Whether quick runs include the implementation; False if it starts slowly and other rows cover its peer.
    """

    setup: Callable[[Any, Any], Any]
    call: Callable[[Any], Any] = operator.call
    fresh: Callable[[Any], Any] | None = None
    clocked: bool = False
    quick: bool = True


@dataclass(frozen=True)
class Row:
    """Task, with one implementation per contestant.

    Attributes
    ----------
    name
        Name of the row in the table.
    data
        Function that creates the data of all contestants.
    ways
        Implementations by contestant name: `ours`, `bare`, and names of peers.
    traffic
        Whether moving bytes, not Python code, dominates the time.
    view
        Converts a result to plain containers and arrays for comparison; None to skip the comparison.
    bar
        Largest acceptable multiple of the bare time; None for the default, `TRAFFIC_BAR` or `PYTHON_BAR`.
    level
        Multiple of the fastest peer's time that our time must stay below.
    """

    name: str
    data: Callable[[], Any]
    ways: dict[str, Way]
    traffic: bool = False
    view: Callable[[Any], Any] | None = plain
    bar: float | None = None
    level: float = 1.0

    def ways_of(self, effort: Effort) -> dict[str, Way]:
        """Return the implementations that a run includes, by contestant."""
        return {name: way for name, way in self.ways.items() if way.quick or effort != QUICK}

    def bar_at(self, bare_us: float) -> float:
        """Return the largest acceptable multiple of `bare_us`, the bare time in microseconds."""
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
        Implementation for both `ours` and `rllib`, whose batches share an interface.
    ways
        Implementation per contestant: a `Way`, or only its call, which then receives the data as the library's
        batch.
    """
    if batch is not None:
        ways = {"ours": batch, "rllib": batch, **ways}
    row_ways = {key: way if isinstance(way, Way) else Way(_batch_of, way) for key, way in ways.items()}
    return Row(name, data, row_ways, traffic, view, bar, level)


@dataclass(frozen=True)
class Effort:
    """Duration and number of samples of a measurement.

    Attributes
    ----------
    sample_s
        Minimum duration of a sample in seconds; 0 for a single call without warm-up.
    pause_s
        Pause before a sample in seconds.
    rounds
        Maximum number of samples per contestant.
    budget_s
        Total seconds of samples after which a contestant with at least five samples is not sampled further.
    """

    sample_s: float
    pause_s: float
    rounds: int
    budget_s: float


FULL = Effort(sample_s=0.008, pause_s=0.004, rounds=41, budget_s=2.5)
QUICK = Effort(sample_s=0.0, pause_s=0.0, rounds=1, budget_s=0.0)


@dataclass
class Outcome:
    """Measured times of a row's contestants.

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
        peers = [name for name in self.us if name not in (OURS, BARE)]
        return min(peers, key=self.us.__getitem__, default=None)

    def ratio_to(self, contestant: str | None) -> float | None:
        """Return our time divided by a contestant's time; None if either was not measured."""
        if self.ours is None or contestant is None or contestant not in self.us:
            return None
        return self.ours / self.us[contestant]

    @property
    def misses(self) -> list[str]:
        """Reasons why the row misses its target; empty if it meets the target."""
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
        """Reasons why the row misses its target, or `met`, or `not measured`."""
        return "; ".join(self.misses) or ("met" if self.ours is not None else "not measured")


class DisagreementError(AssertionError):
    """Two contestants of a row return different results."""


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
        """Call the task `calls` times and return the total duration in seconds."""
        call, fresh, state = self.way.call, self.way.fresh, self.state
        if self.way.clocked:
            return sum(call(state) for _ in range(calls))
        if fresh is None:
            start = perf_counter()
            for _ in repeat(None, calls):
                call(state)
            return perf_counter() - start
        # Pop the arguments: an argument that a call has enlarged is released before the next call.
        pop = [fresh(state) for _ in range(calls)].pop
        start = perf_counter()
        for _ in repeat(None, calls):
            call(pop())
        return perf_counter() - start

    def warm_up(self, sample_s: float) -> None:
        """Run until caches and pools are warm, and determine the number of calls per sample.

        The first calls touch new memory pages and may be a hundred times slower than later calls. The number of calls
        is therefore accepted only if a repeated measurement is also long enough.
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
        path = differs(row.view(other.result()), expected)
        if path is not None:
            raise DisagreementError(f"{row.name}: {other.name} and {reference.name} disagree at {path}")


def measure(row: Row, effort: Effort = FULL, only: frozenset[str] | None = None) -> Outcome:
    """Check that a row's contestants return equal results, and time them alternately.

    Parameters
    ----------
    row
        Row to measure.
    effort
        Duration of the measurement.
    only
        Names of the contestants to include; None for all.

    Raises
    ------
    DisagreementError
        If two contestants return different results.
    """
    data = row.data()
    contestants = [
        _Contestant(name, way, way.setup(lib, data))
        for name, way in row.ways_of(effort).items()
        if (only is None or name in only) and (lib := library(name)) is not None
    ]
    _check(row, contestants)
    gc.collect()
    gc.disable()
    try:
        for contestant in contestants if effort.sample_s else ():
            contestant.warm_up(effort.sample_s)
        for round_index in range(effort.rounds):
            first = round_index % max(len(contestants), 1)
            for contestant in contestants[first:] + contestants[:first]:
                if contestant.spent_s < effort.budget_s or len(contestant.samples) < min(5, effort.rounds):
                    contestant.sample(effort.pause_s)
    finally:
        gc.enable()
    return Outcome(row, {c.name: median(c.samples) * 1e6 for c in contestants})

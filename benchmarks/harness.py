"""Rows of work, the ways of doing each, and the clock.

A `Row` names some work and declares how each contestant does it. `measure` sets all contestants up, checks that they
agree on the result, and times them in turns: one sample of each per round, in an order that rotates, so that a machine
whose speed drifts favours nobody. A sample is many calls, as many as make it long enough to time. Before it there is a
pause and a call that is not timed, so that nobody pays for the caches and the threads, still spinning for more work,
that the contestant before leaves behind. The medians of the samples are reported. The garbage collector is off while
the clock runs. A call costs one Python function call beside the work itself (some 40 ns, the same for all), as it
would in a user's loop.
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
"""From here on, a row that moves memory is held to the stricter bar."""

TRAFFIC_BAR = 1.15
PYTHON_BAR = 2.5


@dataclass(frozen=True)
class Way:
    """One way of doing a row's work.

    Attributes
    ----------
    setup
        Makes, from a library and the row's data, what the calls stand on. Not timed.
    call
        The work, given what `setup` made. What it returns is dropped before the next call.
    fresh
        For work that changes its argument: makes the argument of every single call from what `setup` made. Not timed.
    clocked
        Whether `call` returns the seconds it took, measured by itself, in place of a result.
    quick
        Whether quick runs try it, too; False for one that takes seconds to start, where other rows try the same.
    """

    setup: Callable[[Any, Any], Any]
    call: Callable[[Any], Any] = operator.call
    fresh: Callable[[Any], Any] | None = None
    clocked: bool = False
    quick: bool = True


@dataclass(frozen=True)
class Row:
    """Some work, and the ways of doing it by the name of the contestant.

    Attributes
    ----------
    name
        The row's name in the table.
    data
        Makes the data that every contestant works on.
    ways
        By contestant: `ours`, `bare`, and names of peers.
    traffic
        Whether the time goes to moving bytes rather than to Python.
    view
        Turns a result into plain containers and arrays to be compared, or None where results differ by nature.
    bar
        How many times the bare time is good enough, where the usual bars do not apply.
    level
        How many times the fastest peer's time is good enough, where being ahead of it is not the aim.
    """

    name: str
    data: Callable[[], Any]
    ways: dict[str, Way]
    traffic: bool = False
    view: Callable[[Any], Any] | None = plain
    bar: float | None = None
    level: float = 1.0

    def ways_of(self, effort: Effort) -> dict[str, Way]:
        """Return the ways that a run has: quick ones leave some out."""
        return {who: way for who, way in self.ways.items() if way.quick or effort != QUICK}

    def bar_at(self, bare_us: float) -> float:
        """Return how many times the bare time is good enough."""
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
        The way of `ours` and `rllib` alike: the two share an interface, so they run the same line.
    ways
        By contestant, a `Way`, or just its call, which is then given the data as that library's own batch.
    """
    if batch is not None:
        ways = {"ours": batch, "rllib": batch, **ways}
    complete = {who: way if isinstance(way, Way) else Way(_batch_of, way) for who, way in ways.items()}
    return Row(name, data, complete, traffic, view, bar, level)


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes
    ----------
    sample_s
        Length that one sample should have; 0 for a single call, which nothing warms up.
    pause_s
        Rest before a sample.
    rounds
        Samples of each contestant.
    budget_s
        Seconds after which a contestant takes no more samples, once it has five.
    """

    sample_s: float
    pause_s: float
    rounds: int
    budget_s: float


FULL = Effort(sample_s=0.008, pause_s=0.004, rounds=41, budget_s=2.5)
QUICK = Effort(sample_s=0.0, pause_s=0.0, rounds=1, budget_s=0.0)


@dataclass
class Outcome:
    """What a row's contestants took.

    Attributes
    ----------
    us
        Median microseconds a call, by contestant.
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
        """Say in which ways the row misses the bar; empty where it is met."""
        found = []
        peer = self.fastest_peer
        to_peer, to_bare = self.ratio_to(peer), self.ratio_to(BARE)
        if to_peer is not None and to_peer >= self.row.level:
            found.append(f"behind {peer}")
        if to_bare is not None and self.bare is not None and to_bare > self.row.bar_at(self.bare):
            found.append(f"over {self.row.bar_at(self.bare):g}x bare")
        return found

    @property
    def verdict(self) -> str:
        """Hold the row against its bar in words."""
        return "; ".join(self.misses) or ("met" if self.ours is not None else "not measured")


class DisagreementError(AssertionError):
    """Two contestants of a row came to different results."""


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
        """Return the seconds that so many calls take."""
        call, fresh, state = self.way.call, self.way.fresh, self.state
        if self.way.clocked:
            return sum(call(state) for _ in range(calls))
        if fresh is None:
            start = perf_counter()
            for _ in repeat(None, calls):
                call(state)
            return perf_counter() - start
        # Popped, not iterated: an argument that grew by the call is released before the next one grows.
        pop = [fresh(state) for _ in range(calls)].pop
        start = perf_counter()
        for _ in repeat(None, calls):
            call(pop())
        return perf_counter() - start

    def warm_up(self, sample_s: float) -> None:
        """Run until caches and pools are warm, and find how many calls make a sample.

        The first calls that touch fresh pages may take a hundred times as long as those after them: a number of calls
        counts once it has taken long enough twice.
        """
        calls, taken = 1, self.time(1)
        while taken < sample_s or (taken := self.time(calls)) < sample_s / 2:
            calls = max(calls + 1, min(calls * 10, int(calls * 1.2 * sample_s / max(taken, 1e-9))))
            taken = self.time(calls)
        self.calls = calls

    def sample(self, pause_s: float) -> None:
        sleep(pause_s)
        if self.calls > 1:
            self.time(1)
        taken = self.time(self.calls)
        self.spent_s += taken
        self.samples.append(taken / self.calls)


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
    """Check that a row's contestants agree, and time them in turns.

    Parameters
    ----------
    row
        The work.
    effort
        How long to measure.
    only
        Names of contestants to leave it at.

    Raises
    ------
    DisagreementError
        If two contestants come to different results.
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

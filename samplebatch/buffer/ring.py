"""Rings: write positions and running episodes of n ring buffers at once.

This module does the arithmetic and holds no rows. As long as all rings are written together, a step of all environments
costs no more than a step of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.buffer.cursors import Cursors
from samplebatch.buffer.cursors import Flags as Flags
from samplebatch.buffer.cursors import Ints as Ints
from samplebatch.errors import FormatError

Added = tuple[Ints, npt.NDArray[Any], Ints, Ints]
"""Slots of new steps, returns and lengths of the episodes that ended with them (zero for others), first slots."""

_count = np.count_nonzero
_zeros = np.zeros
_INTP = np.dtype(np.intp)


_AHEAD = 1 << 12
"""Slots that are computed ahead of their use."""


class Rings(Cursors):
    """Ring buffers of slots: the cursors, sizes and running episodes of n of them, for `Table`.

    Parameters
    ----------
    maxsizes
        Slots of each ring.

    Attributes
    ----------
    nothing
        The return of no step: zero, of the shape of one reward.
    ep_return, began, ep_start
        Of the running episodes: their returns, the writes of their rings when they began, their first slots; shape
        (n, ...). Of a single ring they are plain numbers.

    Examples
    --------
    >>> rings = Rings([3, 3])
    >>> for _ in range(4):
    ...     slots, *_ = rings.advance(None, np.zeros(2, bool), np.ones(2))
    >>> slots, len(rings), rings.chronological()
    (array([0, 3]), 6, array([1, 2, 0, 4, 5, 3]))
    >>> rings.advance(np.array([1]), np.array([True]), np.ones(1))
    (array([4]), array([5.]), array([5]), array([3]))
    """

    __slots__ = ("_slots_to_come", "_unended", "began", "ep_return", "ep_start", "nothing")

    def __init__(self, maxsizes: Sequence[int]) -> None:
        super().__init__(maxsizes)
        self.nothing: Any = 0.0
        self.ep_return: Any = _zeros(self.n)
        self.began: Any = _zeros(self.n, _INTP)
        self.ep_start: Any = self.bases.copy()
        self._slots_to_come: Iterator[Ints] = iter(())
        if self.n == 1:
            self._begin_episode(0, 0, 0.0)
        self._share()

    def expect(self, row_shape: tuple[int, ...]) -> None:
        """Set the shape of rewards, and the returns of running episodes to zero."""
        self.nothing = _zeros(row_shape) if row_shape else 0.0
        if self.n == 1:
            self._begin_episode(self.began, self.ep_start, self.nothing)
        else:
            self.ep_return = _zeros((self.n, *row_shape))
            self._share()

    # Writing

    def targets(self, rings: Ints | None) -> Ints | slice | int:
        """Return the slots that the next step of some rings, or of all, goes to; nothing is changed."""
        if rings is None:
            if self.together:
                return self.cursor if self.n == 1 else slice(self.cursor, self.capacity, self.even)
            return self.bases + self.cursors
        return self.bases[rings] + (self.cursor if self.together else self.cursors[rings])

    def run_on(self, rew: Any) -> Added:
        """Count a step of the only ring as written that ends no episode; see `advance`.

        All but the slot is the same for many steps: these arrays are shared, and read-only.
        """
        after = self.cursor + 1
        try:
            slots = next(self._slots_to_come)
        except StopIteration:
            slots = self._next_slots()
        self.writes += 1
        if after > self.size:
            self.size = after
        self.cursor = after if after < self.capacity else 0
        # Not in place: the zeros at an episode's beginning are for all episodes.
        self.ep_return = self.ep_return + rew
        starts, returns, lengths = self._unended
        return slots, returns, lengths, starts

    def _next_slots(self) -> Ints:
        """Compute the slots of many steps ahead, and return those of the next step."""
        length = self.capacity // self.n
        places = np.arange(self.cursor, min(self.cursor + max(_AHEAD // self.n, 1), length))
        self._slots_to_come = iter(places[:, None] + self.bases)
        return next(self._slots_to_come)

    def advance(self, rings: Ints | None, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        """Count a step of some rings, or of all, as written.

        Parameters
        ----------
        rings
            Numbers of k rings, none twice, shape (k,); None for all in order.
        done
            Whether an episode ended with the step, shape (k,).
        rew
            Rewards, shape (k, ...).
        """
        if self.n == 1:
            return self._advance_single(done, rew)
        if rings is None:
            return self.advance_all(done, rew)
        if self.together:
            self._separate()
        places = self.cursors[rings]
        maxsizes, bases = self.maxsizes[rings], self.bases[rings]
        after = (places + 1) % maxsizes
        self.cursors[rings] = after
        self.sizes[rings] = np.minimum(self.sizes[rings] + 1, maxsizes)
        self.written[rings] += 1
        totals = self.ep_return[rings] + rew
        self.ep_return[rings] = totals
        starts = self.ep_start[rings]
        if not _count(done):
            return bases + places, _zeros(totals.shape), _zeros(len(rings), _INTP), starts
        ended = rings[done]
        returns, lengths = _zeros(totals.shape), _zeros(len(rings), _INTP)
        returns[done] = totals[done]
        lengths[done] = self.written[ended] - self.began[ended]
        self.began[ended] = self.written[ended]
        self.ep_start[ended] = bases[done] + after[done]
        self.ep_return[ended] = 0.0
        self._share()
        return bases + places, returns, lengths, starts

    def _advance_single(self, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        number = rew[0] if rew.ndim > 1 else rew.item()
        if not done[0]:
            return self.run_on(number)
        total, start = self.ep_return + number, self.ep_start
        slots, *_ = self.run_on(number)
        lengths = np.array([self.writes - self.began])
        self._begin_episode(self.writes, self.cursor, self.nothing)
        return slots, np.array([total]), lengths, np.array([start])

    def _begin_episode(self, began: int, start: int, total: Any) -> None:
        """Set the running episode of the only ring: its first write, its first slot, its return."""
        self.began, self.ep_start, self.ep_return = began, start, total
        self._share()

    def end_episode(self, ring: int) -> None:
        """Let the running episode of a ring end with its newest step."""
        together = self.together
        written, place = (self.writes, self.cursor) if together else (int(self.written[ring]), int(self.cursors[ring]))
        start = int(self.bases[ring]) + place
        if self.n == 1:
            self._begin_episode(written, start, self.nothing)
        else:
            self.began[ring], self.ep_start[ring], self.ep_return[ring] = written, start, 0.0
            self._share()

    def _share(self) -> None:
        """Rebuild the arrays that steps share which end no episode."""
        nothing = _zeros((self.n, *np.shape(self.nothing)))
        self._unended = np.array(self.ep_start).reshape(self.n), nothing, _zeros(self.n, _INTP)
        for array in self._unended:
            array.flags.writeable = False

    def advance_all(self, done: Flags, rew: npt.NDArray[np.float64]) -> Added:
        """Count a step of all of several rings as written; see `advance`.

        Of steps none of which ends an episode, all but the slots are the same: these arrays are shared, and read-only.
        """
        written: Any
        after: Any
        if self.together:
            try:
                slots = next(self._slots_to_come)
            except StopIteration:
                slots = self._next_slots()
            self.writes = written = self.writes + 1
            after = self.cursor + 1
            if after > self.size:
                self.size = after
            self.cursor = after = after if after < self.even else 0
        else:
            slots = self.bases + self.cursors
            self.written = written = self.written + 1
            after = (self.cursors + 1) % self.maxsizes
            self.cursors = after
            self.sizes = np.minimum(self.sizes + 1, self.maxsizes)
        totals = self.ep_return
        totals += rew
        starts, returns, lengths = self._unended
        if done.tobytes().count(0) == self.n:
            return slots, returns, lengths, starts
        returns, lengths = returns.copy(), lengths.copy()
        returns[done] = totals[done]
        lengths[done] = (written - self.began)[done]
        np.copyto(self.began, written, where=done)
        np.copyto(self.ep_start, self.bases + after, where=done)
        totals[done] = 0.0
        self._share()
        return slots, returns, lengths, starts

    def append(self, ring: int, count: int) -> Ints:
        """Count rows of one ring as written that belong to no running episode; return their slots.

        The running episode is neither ended nor lengthened.
        """
        base, maxsize = int(self.bases[ring]), int(self.maxsizes[ring])
        self._slots_to_come = iter(())
        if self.n == 1:
            place, self.size = self.cursor, min(self.size + count, maxsize)
            self.cursor = (place + count) % maxsize if maxsize else 0
            self.writes += count
            self.began += count
        else:
            if self.together:
                self._separate()
            place = int(self.cursors[ring])
            self.sizes[ring] = min(int(self.sizes[ring]) + count, maxsize)
            self.cursors[ring] = (place + count) % maxsize if maxsize else 0
            self.written[ring] += count
            self.began[ring] += count
        return base + np.arange(place, place + count) % max(maxsize, 1)

    def reset(self, rings: Iterable[int] | None = None, *, keep_statistics: bool = False) -> None:
        """Empty some rings, or all.

        Parameters
        ----------
        rings
            Their numbers.
        keep_statistics
            Whether the running episodes go on, though their steps are gone.
        """
        chosen = list(range(self.n) if rings is None else rings)
        if len(chosen) == self.n:
            # With one number of writes for all, the rings can go together again.
            lengths = (self.writes if self.together else self.written) - self.began
            written = _next_round(np.full(self.n, self.writes, _INTP) if self.together else self.written, self.maxsizes)
            self.cursor = self.size = 0
            self._slots_to_come = iter(())
            self.writes = int(written.max())
            self.together = bool(self.even) or self.n == 1
            if not self.together:
                self._separate()
                self.written = written
            begun = written if not self.together else self.writes
            self.origins[:] = begun
            self.began = begun - lengths if keep_statistics else begun + 0 * self.began
            if self.n == 1:
                self._begin_episode(self.began, 0, self.ep_return)
            else:
                self.ep_start = self.bases.copy()
                self._share()
            if not keep_statistics:
                self.expect(np.shape(self.nothing))
            return
        if self.together:
            self._separate()
        for ring in chosen:
            length = int(self.written[ring] - self.began[ring])
            self.cursors[ring] = self.sizes[ring] = 0
            self.origins[ring] = self.written[ring] = _next_round(self.written[ring], self.maxsizes[ring])
            self.began[ring] = self.written[ring] - (length if keep_statistics else 0)
            self.ep_start[ring] = self.bases[ring]
            if not keep_statistics:
                self.ep_return[ring] = 0.0
        self._share()

    # Carrying on elsewhere

    def state_dict(self, ring: int | None = None) -> dict[str, Any]:
        """Return the state of all rings, or of one, as plain numbers and arrays for `load_state_dict`.

        Examples
        --------
        >>> rings = Rings([4])
        >>> slots, *_ = rings.advance(None, np.array([False]), np.array([1.5]))
        >>> again = Rings([4])
        >>> again.load_state_dict(rings.state_dict())
        >>> again.advance(None, np.array([True]), np.array([1.0]))
        (array([1]), array([2.5]), array([2]), array([0]))
        """
        written = np.full(self.n, self.writes, _INTP) if self.together else self.written.copy()
        found = {
            "maxsizes": self.maxsizes.copy(),
            "cursors": self.cursors_of_all(),
            "sizes": self.sizes_of_all(),
            "writes": written,
            "began": np.array(self.began).reshape(self.n),
            "starts": np.array(self.ep_start).reshape(self.n),
            "returns": np.array(self.ep_return).reshape(self.n, *np.shape(self.nothing)),
            "origins": self.origins.copy(),
        }
        if ring is None:
            return found | {"together": self.together}
        found = {name: part[ring : ring + 1] for name, part in found.items()}
        return found | {"starts": found["starts"] - self.bases[ring], "together": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` of rings of the same sizes.

        Raises
        ------
        FormatError
            If it is of rings of other sizes.
        """
        if not np.array_equal(state["maxsizes"], self.maxsizes):
            found, wanted = np.asarray(state["maxsizes"]).tolist()[:8], self.maxsizes.tolist()[:8]
            raise FormatError(f"the state must be of rings of {wanted} slots, got one of {found}")
        cursors, sizes, writes = (np.array(state[name], _INTP) for name in ("cursors", "sizes", "writes"))
        self.together = bool(state["together"])
        if self.together:
            self.cursor, self.size, self.writes = int(cursors[0]), int(sizes[0]), int(writes[0])
        else:
            self.cursors, self.sizes, self.written = cursors, sizes, writes
        self.began, self.ep_start = np.array(state["began"], _INTP), np.array(state["starts"], _INTP)
        self.origins = np.array(state["origins"], _INTP)
        returns = np.array(state["returns"], np.float64)
        self._slots_to_come = iter(())
        self.expect(returns.shape[1:])
        self.ep_return = returns
        if self.n == 1:
            total = returns[0] if returns.ndim > 1 else float(returns[0])
            self._begin_episode(int(self.began[0]), int(self.ep_start[0]), total)

    def take_over(self, ring: int, state: dict[str, Any]) -> None:
        """Continue one ring from the `state_dict` of another of its size."""
        found = {name: state[name][0] for name in state if name not in ("maxsizes", "together")}
        self._slots_to_come = iter(())
        self.origins[ring] = found["origins"]
        total = found["returns"]
        if self.n == 1:
            self.cursor, self.size, self.writes = (int(found[name]) for name in ("cursors", "sizes", "writes"))
            self._begin_episode(int(found["began"]), int(found["starts"]), total if total.ndim else float(total))
            return
        if self.together:
            self._separate()
        self.cursors[ring], self.sizes[ring], self.written[ring] = found["cursors"], found["sizes"], found["writes"]
        self.began[ring], self.ep_start[ring] = found["began"], found["starts"] + self.bases[ring]
        if np.shape(total) == np.shape(self.nothing):
            self.ep_return[ring] = total
        self._share()

    def unite(self) -> None:
        """Give all rings one cursor again if their positions are equal."""
        places = set(zip(self.cursors.tolist(), self.sizes.tolist(), self.written.tolist(), strict=True))
        if self.together or not self.even or len(places) > 1:
            return
        self.cursor, self.size, self.writes = int(self.cursors[0]), int(self.sizes[0]), int(self.written[0])
        self.together = True
        self._slots_to_come = iter(())


def _next_round(written: Any, maxsizes: Any) -> Any:
    """Return the next write number that begins a round: no slot has a generation again that it had before."""
    return (-(-written // np.maximum(maxsizes, 1)) + 1) * maxsizes

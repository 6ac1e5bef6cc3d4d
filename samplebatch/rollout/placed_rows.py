"""PlacedRows: the rows of a policy's agents, written where they stay.

The columns lie in a slot that the fragment will be sent from, or else in memory of their own. Every value is written
once, to the row where it belongs, as soon as it is there: observations before the policy is asked, what it decides
before the environment is stepped, the rest after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.spaces import Leaf
from samplebatch.env.teams import Acted, Key, Outcome, Team
from samplebatch.policy.deciding import Decided
from samplebatch.rollout.placed_columns import Misfit, PlacedColumns, kept_info
from samplebatch.rollout.places import Place, Places

_FIRST = (names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS, names.INFOS)
_LAST = (names.EPS_ID, names.ENV_ID, names.AGENT_INDEX, names.T, names.EPS_DONE)
_FLAGS = (names.TERMINATEDS, names.TRUNCATEDS, names.EPS_DONE)
_INT64, _BOOL = np.dtype(np.int64), np.dtype(np.bool_)
_ndarray = np.ndarray


class PlacedRows:
    """The rows of a policy's agents, each in its place.

    Parameters
    ----------
    room
        How many rows an agent will have.
    rows
        How many rows there will be, as far as is known; where there are columns, as many as they have.
    columns
        Where rows are written, by dotted name; None for memory of their own.

    Attributes
    ----------
    columns
        What they hold.
    places
        Which rows are whose.
    acting
        The teams that have begun a step and not finished it.
    """

    def __init__(self, room: Callable[[Key], int], rows: int, columns: Mapping[str, Any] | None) -> None:
        self.columns = PlacedColumns(columns, 0 if columns is None else rows)
        self.places = Places(room, self._make_room, self.columns.capacity)
        self.acting: dict[Team, None] = {}
        self._expected = rows
        self._order: list[str] = []
        self._known: tuple[str, ...] | None = None
        self._marked: dict[str, list[int]] = {name: [] for name in _FLAGS}
        self._rows: npt.NDArray[np.intp] = np.empty(0, np.intp)

    def place(self, teams: Sequence[Team]) -> None:
        """Give places to agents that have none yet, in their order."""
        if not self.columns.capacity:
            self.places.expect([key for team in teams for key in team.keys])
        for team in teams:
            team.places = list(map(self.places.of, team.keys, team.indices))
            self._open(team)

    def begin(self, teams: Sequence[Team]) -> Leaf | None:
        """Write what agents see before they act.

        Returns
        -------
        numpy.ndarray or None
            The observations one under the other, where they are numbers of one shape.

        Raises
        ------
        Misfit
            If there is no place for one.
        """
        self.acting = dict.fromkeys(teams)
        rows: list[int] = []
        seen = self.columns.by_name.get(names.OBS)
        row_shape = None if seen is None else seen.shape[1:]
        for team in teams:
            if team.begins is not None:
                self._open(team)
            for place, value in zip(team.places, team.observations, strict=True):
                if place.row == place.stop:
                    self._move_on(place, team)
                    seen = self.columns.by_name.get(names.OBS)
                row = place.row
                rows.append(row)
                if (
                    seen is not None
                    and type(value) is _ndarray
                    and value.dtype is seen.dtype
                    and value.shape == row_shape
                ):
                    seen[row] = value
                else:
                    self.columns.put(row, names.OBS, value)
                    seen = self.columns.by_name.get(names.OBS)
                    row_shape = None if seen is None else seen.shape[1:]
        self._rows = np.array(rows, np.intp)
        return None if seen is None else seen.take(self._rows, 0)

    def decided(self, decided: Decided) -> None:
        """Write what those agents do about whom `begin` was called, the first of the decision.

        Raises
        ------
        Misfit
            If there is no place for it.
        """
        rows = self._rows
        if self._known != tuple(decided.columns):
            self._learn(decided.columns)
        for name, values in decided.columns.items():
            column = self.columns.by_name[name]
            if values.dtype != column.dtype or values.shape[1:] != column.shape[1:]:
                raise Misfit
            column[rows] = values[: len(rows)]
        if decided.kept is not None:
            for row, action in zip(rows.tolist(), decided.kept, strict=False):
                self.columns.put(row, names.ACTIONS, action)

    def finish(self, team: Team, outcome: Outcome) -> None:
        """Write what came of a team's actions, which makes its rows whole.

        Raises
        ------
        Misfit
            If there is no place for it.
        """
        seen, rewards, infos = (
            self.columns.by_name.get(names.NEXT_OBS),
            self.columns.by_name.get(names.REWARDS),
            self.columns.infos,
        )
        numbers = self.columns.scalars.get(names.REWARDS, ())
        row_shape = None if seen is None else seen.shape[1:]
        observations, paid, terminateds, truncateds, said, ended, eps_done = outcome
        for place, value, reward, info in zip(team.places, observations, paid, said, strict=True):
            row = place.row
            if seen is not None and type(value) is _ndarray and value.dtype is seen.dtype and value.shape == row_shape:
                seen[row] = value
            else:
                self.columns.put(row, names.NEXT_OBS, value)
            if type(reward) in numbers and rewards is not None:
                rewards[row] = reward
            else:
                self.columns.put(row, names.REWARDS, reward)
            infos[row] = info.copy() if type(info) is dict else kept_info(info)
        if ended or eps_done:
            self._mark(names.TERMINATEDS, team.places, terminateds)
            self._mark(names.TRUNCATEDS, team.places, truncateds)
            self._mark(names.EPS_DONE, team.places, [eps_done] * len(team.places))
        for place in team.places:
            place.row += 1
        del self.acting[team]

    def _mark(self, name: str, places: Sequence[Place], flags: Sequence[Any]) -> None:
        self._marked[name] += [place.row for place, flag in zip(places, flags, strict=True) if flag]

    def add(self, key: Key, row: Mapping[str, Any]) -> None:
        """Write a row that is whole.

        Raises
        ------
        Misfit
            If there is no place for it.
        """
        if not self.columns.capacity:
            self.places.expect([key])
        place = self.places.of(key, row[names.AGENT_INDEX])
        if place.row == place.stop:
            self.places.more(place)
        order = list(row)
        if self._order != order:
            if self._order:
                raise Misfit
            self._order = order
        for name, value in row.items():
            self.columns.put(place.row, name, value)
        place.row += 1

    def build(self, stamps: Mapping[str, int], order: Callable[[Key], int] | None) -> SampleBatch:
        """Return the rows that are whole, one agent after the other, and columns that have one value each.

        Agents are in the order in which they came, sorted by `order`.
        """
        self._settle()
        for name in stamps:
            self.columns.column(name, _INT64, ())
        count, moves, rest = self.places.moves(order)
        if moves or rest is not None:
            self.columns.move(count, moves, rest)
        for name, value in stamps.items():
            self.columns.by_name[name][:count] = value
        return self.columns.batch([*self._order, *stamps], count)

    def parts(self) -> Iterator[tuple[Key, list[SampleBatch]]]:
        """Yield what each agent has made, in the order in which they first acted."""
        self._settle()
        is_empty = not any(place.ranges() for place in self.places.by_key.values())
        steps = SampleBatch() if is_empty else self.columns.batch(self._order, self.columns.capacity)
        for key, place in self.places.by_key.items():
            yield key, [steps.slice(start, stop) for start, stop in place.ranges()]

    def acted(self, team: Team) -> list[Acted]:
        """Return what a team's agents saw and did in a step that is not finished."""
        further = [name for name in self._order if name not in _FIRST and name not in _LAST]
        return [
            Acted(
                self.columns.value(names.OBS, place.row),
                self.columns.value(names.ACTIONS, place.row),
                {name: self.columns.value(name, place.row) for name in further},
            )
            for place in team.places
        ]

    # -- where rows lie ------------------------------------------------------------------------------------------------

    def _open(self, team: Team) -> None:
        """Note where episodes of a team's agents begin, or go on from another fragment."""
        run = team.run
        for place, begins in zip(team.places, team.begins or [False] * len(team.places), strict=True):
            if begins or place.since is None:
                self._close([place])
                place.since, place.eps_id, place.t = place.row, run.eps_id, run.t

    def _move_on(self, place: Place, team: Team) -> None:
        """Give an agent more rows."""
        self._close([place])
        self.places.more(place)
        place.since, place.t = place.row, team.run.t

    def _close(self, places: Iterable[Place]) -> None:
        """Write what is the same in all steps of an episode, or counts on."""
        for place in places:
            since, row = place.since, place.row
            if since is None or since == row:
                continue
            own = (place.eps_id, place.key[0], place.index, np.arange(place.t, place.t + row - since))
            for name, value in zip(_LAST, own, strict=False):
                self.columns.column(name, _INT64, ())[since:row] = value
            for name in _FLAGS:
                self.columns.column(name, _BOOL, ())[since:row] = False
            place.since, place.t = row, place.t + row - since

    def _settle(self) -> None:
        """Write what was put off until now."""
        self._close(self.places.by_key.values())
        for name, rows in self._marked.items():
            if rows:
                self.columns.by_name[name][rows] = True
                rows.clear()

    def _make_room(self, rows: int) -> int:
        """Make room for so many rows, in memory of their own."""
        self.columns.leave(max(rows, 2 * self.columns.capacity if self.columns.capacity else self._expected))
        return self.columns.capacity

    # -- what rows hold ------------------------------------------------------------------------------------------------

    def _learn(self, columns: Mapping[str, Leaf]) -> None:
        """Make columns for what is decided, as far as it lies in arrays."""
        further = dict.fromkeys(name.partition(".")[0] for name in columns if name != names.ACTIONS)
        order = [*_FIRST, *further, *_LAST]
        if self._known is not None or (self._order and self._order != order):
            raise Misfit
        for name, values in columns.items():
            self.columns.column(name, values.dtype, values.shape[1:])
            top, *folders, leaf = name.split(".") if "." in name else ("", name)
            if top:
                tree: Any = self.columns.nested.setdefault(top, {})
                for folder in folders:
                    tree = tree.setdefault(folder, {})
                tree[leaf] = None
        self._known, self._order = tuple(columns), order

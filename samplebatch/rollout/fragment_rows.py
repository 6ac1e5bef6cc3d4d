"""FragmentRows: what the agents of all policies see and do, until it is a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.spaces import Leaf
from samplebatch.env.teams import Key, Outcome, Team
from samplebatch.policy.deciding import Decided
from samplebatch.rollout.built_rows import BuiltRows
from samplebatch.rollout.placed_columns import Misfit
from samplebatch.rollout.placed_rows import PlacedRows
from samplebatch.rollout.places import Forecast, counts


class PolicyRows:
    """What the agents of one policy see and do: in its place as long as it fits there, then in builders.

    Parameters
    ----------
    placed
        The places.
    """

    def __init__(self, placed: PlacedRows) -> None:
        self._placed: PlacedRows | None = placed
        self._built: Any = None
        self._teams: Sequence[Team] = ()

    def place(self, teams: Sequence[Team]) -> None:
        """Take over agents that are nobody's: their rows will be in this order."""
        for team in teams:
            team.owner = self
        (self._placed or self._built).place(teams)

    def begin(self, teams: Sequence[Team]) -> Leaf | None:
        """Take down what agents see before they act; see `PlacedRows.begin`."""
        self._teams = teams
        if self._placed is not None:
            try:
                return self._placed.begin(teams)
            except Misfit:
                self._leave(self._placed)
        self._built.begin(teams)
        return None

    def decided(self, decided: Decided) -> None:
        """Take down what they do."""
        if self._placed is not None:
            try:
                return self._placed.decided(decided)
            except Misfit:
                self._leave(self._placed)
                # The environments have not been stepped, so what agents see is still there.
                self._built.begin(self._teams)
        self._built.decided(self._teams, decided)
        return None

    def finish(self, team: Team, outcome: Outcome) -> None:
        """Take down what came of a team's actions; raises as `BuiltRows.finish` does."""
        if self._placed is not None:
            try:
                return self._placed.finish(team, outcome)
            except Misfit:
                self._leave(self._placed, self._placed.acting)
        self._built.finish(team, outcome)
        return None

    def add(self, key: Key, row: Mapping[str, Any]) -> None:
        """Take down a row that is whole; raises as `BuiltRows.finish` does."""
        if self._placed is not None:
            try:
                return self._placed.add(key, row)
            except Misfit:
                self._leave(self._placed)
        self._built.add(key, row)
        return None

    def _leave(self, placed: PlacedRows, acting: Iterable[Team] = ()) -> None:
        """Go on with builders; of those that are acting, what they see and do is taken over."""
        self._built = BuiltRows(placed, acting)
        self._placed = None

    def counts(self) -> dict[Key, int]:
        """Count the rows of each agent."""
        made: dict[Key, int] = self._built.counts() if self._placed is None else counts(self._placed.places.by_key)
        return {key: count for key, count in made.items() if count}

    def build(self, stamps: Mapping[str, int], order: Callable[[Key], int] | None) -> SampleBatch:
        """Return the rows as a batch, and let go of them; raises as `BuiltRows.build` does."""
        rows, self._placed, self._built = self._placed or self._built, None, None
        whole: SampleBatch = rows.build(stamps, order)
        return whole


class FragmentRows:
    """What the agents of all policies see and do.

    Parameters
    ----------
    forecast
        How many rows there will be.
    columns
        Where they are written, by policy and dotted name, with room for as many as the forecast says; None for memory
        of their own.
    """

    def __init__(self, forecast: Forecast, columns: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._forecast = forecast
        self._expected = forecast.rows()
        self._columns = columns or {}
        self._policies: dict[str, PolicyRows] = {}
        self._first: dict[tuple[int, str], None] = {}

    def of(self, policy_id: str) -> PolicyRows:
        """Return the rows of a policy."""
        found = self._policies.get(policy_id)
        if found is None:
            room = partial(self._forecast.room, policy_id)
            placed = PlacedRows(room, self._expected.get(policy_id, 0), self._columns.get(policy_id))
            found = self._policies[policy_id] = PolicyRows(placed)
        return found

    def place(self, teams: Sequence[Team]) -> None:
        """Find rows for agents that have none yet; those of one policy will be in the order in which they come here."""
        by_policy: dict[str, list[Team]] = {}
        for team in teams:
            by_policy.setdefault(team.policy_id, []).append(team)
            self._first[team.run.env_id, team.policy_id] = None
        for policy_id, own in by_policy.items():
            self.of(policy_id).place(own)

    def counts(self) -> dict[str, dict[Key, int]]:
        """Count the rows of each agent, by policy."""
        counted = {policy_id: rows.counts() for policy_id, rows in self._policies.items()}
        return {policy_id: made for policy_id, made in counted.items() if made}

    def build(self, stamps: Mapping[str, int], ranks: Mapping[int, int] | None = None) -> dict[str, SampleBatch]:
        """Return the rows of each policy as a batch.

        Parameters
        ----------
        stamps
            Columns of one value each.
        ranks
            The place of each environment, by `env_id`, where agents are to be in this order; by default they are in the
            order in which they acted first.

        Raises
        ------
        ColumnMismatchError
            If agents of a policy differ in their columns, dtypes or row shapes.
        """
        policies, order = list(self.counts()), None
        if ranks is not None:
            first = [policy_id for _, policy_id in sorted(self._first, key=lambda pair: ranks.get(pair[0], 0))]
            policies.sort(key=[*first, *policies].index)

            def order(key: Key) -> int:
                return ranks.get(key[0], 0)

        return {policy_id: self._policies[policy_id].build(stamps, order) for policy_id in policies}

"""BuiltRows: the rows of a policy's agents whose values are not all of one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.builder import SampleBatchBuilder
from samplebatch.batch.concat import join
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.pettingzoo import kept
from samplebatch.env.teams import Acted, Key, Outcome, Team
from samplebatch.policy.deciding import Decided
from samplebatch.rollout.placed_columns import DTYPES
from samplebatch.rollout.placed_rows import PlacedRows


class BuiltRows:
    """The rows of a policy's agents, gathered agent by agent and joined when all are there.

    Dtypes may be widened, and values may be objects. Every value is copied twice.

    Parameters
    ----------
    placed
        Rows that are there already, and have to leave their places.
    acting
        Teams whose step is not finished there, and will be here.
    """

    def __init__(self, placed: PlacedRows, acting: Iterable[Team] = ()) -> None:
        self._builders: dict[Key, SampleBatchBuilder] = {}
        for key, parts in placed.parts():
            builder = self._builder(key)
            for part in parts:
                builder.add_batch(part)
        for team in acting:
            team.places = placed.acted(team)

    def place(self, teams: Sequence[Team]) -> None:
        """Note agents that have not acted yet, in their order."""
        for team in teams:
            for key in team.keys:
                self._builder(key)

    def begin(self, teams: Sequence[Team]) -> None:
        """Keep what agents see before they act."""
        for team in teams:
            team.places = list(map(kept, team.observations))

    def decided(self, teams: Sequence[Team], decided: Decided) -> None:
        """Keep what those agents do."""
        for team in teams:
            rows = map(decided.row, range(team.at, team.at + len(team.agents)))
            team.places = [Acted(seen, *row) for seen, row in zip(team.places, rows, strict=True)]

    def finish(self, team: Team, outcome: Outcome) -> None:
        """Add a team's rows.

        Raises
        ------
        ColumnMismatchError, ColumnTypeError
            As `SampleBatchBuilder.add_values` does.
        """
        run = team.run
        given = zip(
            team.keys,
            team.indices,
            team.places,
            outcome.observations,
            outcome.rewards,
            outcome.terminateds,
            outcome.truncateds,
            outcome.infos,
            strict=True,
        )
        for key, index, acted, seen, reward, terminated, truncated, info in given:
            row = {
                names.OBS: acted.observation,
                names.NEXT_OBS: seen,
                names.ACTIONS: acted.action,
                names.REWARDS: reward,
                names.TERMINATEDS: bool(terminated),
                names.TRUNCATEDS: bool(truncated),
                names.INFOS: info,
                **acted.further,
                names.EPS_ID: run.eps_id,
                names.ENV_ID: run.env_id,
                names.AGENT_INDEX: index,
                names.T: run.t,
                names.EPS_DONE: outcome.eps_done,
            }
            self._builder(key).add_values(**row)

    def add(self, key: Key, row: Mapping[str, Any]) -> None:
        """Add a row that is whole; raises as `finish` does."""
        self._builder(key).add_values(**row)

    def counts(self) -> dict[Key, int]:
        """Count the rows of each agent."""
        return {key: builder.count for key, builder in self._builders.items()}

    def build(self, stamps: Mapping[str, int], order: Callable[[Key], int] | None) -> SampleBatch:
        """Join the rows, one agent after the other, and columns that have one value each; see `PlacedRows.build`.

        Raises
        ------
        ColumnMismatchError
            If agents differ in their columns, dtypes or row shapes.
        """
        keys = self._builders if order is None else sorted(self._builders, key=order)
        steps = join([self._builders[key]._build() for key in keys if self._builders[key].count])
        for name, value in stamps.items():
            steps[name] = np.full(steps.count, value)
        return steps

    def _builder(self, key: Key) -> SampleBatchBuilder:
        builder = self._builders.get(key)
        if builder is None:
            builder = self._builders[key] = SampleBatchBuilder(dtypes=DTYPES)
        return builder

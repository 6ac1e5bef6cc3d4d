"""PendingChoices: what was decided for environments that have not made the step yet."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.distributions import get_sliced_dist
from samplebatch.env.infos import Rows
from samplebatch.env.spaces import Columns
from samplebatch.errors import ColumnLengthError
from samplebatch.policy import state as policy_state
from samplebatch.policy.as_policy import Decision
from samplebatch.policy.choices import Choice


class PendingChoices:
    """What was decided, an environment a row, until that environment has made the step.

    Environments answer in other companies than those in which they were decided for. So the columns of all choices that
    have the same ones lie in one array a column, in the row of their environment, and are taken out together.

    Parameters
    ----------
    num_envs
        How many environments there are.
    whole
        Whether to give back choices with all that the policy said, each one apart from the others; else with their
        columns only.

    Examples
    --------
    >>> pending = PendingChoices(3)
    >>> pending.put(Choice({"actions": np.array([5, 7])}, [], None, {}), np.array([0, 2]))
    >>> pending.put(Choice({"actions": np.array([6])}, [], None, {}), np.array([1]))
    >>> [(choice.columns["actions"].tolist(), places.tolist()) for choice, places in pending.take(np.array([1, 2]))]
    [([6, 7], [0, 1])]
    """

    def __init__(self, num_envs: int, *, whole: bool = False) -> None:
        self._whole = whole
        self._groups: list[_Group] = []
        self._num_envs = num_envs

    def put(self, choice: Choice, envs: Rows) -> None:
        """Keep what was decided for some environments.

        Raises
        ------
        ColumnLengthError
            If a column has not a row for each of them.
        """
        for name, column in choice.columns.items():
            if not column.ndim or len(column) != len(envs):
                raise ColumnLengthError(
                    f"column {name!r} must have {len(envs)} rows, one for each environment, got "
                    f"{len(column) if column.ndim else 'a single value'}"
                )
        group = self._groups[-1] if self._groups and not self._whole else None
        if group is None or not group.takes(choice.columns):
            group = _Group(self._num_envs, choice)
            # Those before the last one only wait for the steps that are under way.
            self._groups = [*(one for one in self._groups if one.waiting.any()), group]
        group.put(choice, envs)

    def take(self, envs: Rows) -> Iterator[tuple[Choice, Rows]]:
        """Give back what was decided for environments that have made the step.

        Parameters
        ----------
        envs
            The environments, shape (k,).

        Yields
        ------
        choice
            What was decided for some of them.
        places
            Which of the k they are.
        """
        for group in tuple(self._groups):
            places = group.waiting[envs].nonzero()[0]
            if len(places):
                yield group.take(envs[places], whole=self._whole), places

    def clear(self) -> None:
        """Forget all choices: no step is under way."""
        self._groups = []


class _Group:
    """Choices that have the same columns."""

    def __init__(self, num_envs: int, first: Choice) -> None:
        self.waiting = np.zeros(num_envs, np.bool_)
        self._first = first
        self._row_of = np.zeros(num_envs, np.intp)
        self._columns = {
            name: np.empty((num_envs, *column.shape[1:]), column.dtype) for name, column in first.columns.items()
        }

    def takes(self, columns: Columns) -> bool:
        """Tell whether columns are those of this group, so that nothing would be cast."""
        held = self._columns
        return columns.keys() == held.keys() and not any(
            column.dtype != held[name].dtype or column.shape[1:] != held[name].shape[1:]
            for name, column in columns.items()
        )

    def put(self, choice: Choice, envs: Rows) -> None:
        for name, column in choice.columns.items():
            self._columns[name][envs] = column
        self._row_of[envs] = np.arange(len(envs))
        self.waiting[envs] = True

    def take(self, envs: Rows, *, whole: bool) -> Choice:
        self.waiting[envs] = False
        columns = {name: column[envs] for name, column in self._columns.items()}
        if not whole:
            return Choice(columns, [], None, {})
        rows, said = self._row_of[envs], self._first
        return Choice(columns, [leaf[rows] for leaf in said.actions], None, _of_rows(said.decision, rows))


def _of_rows(decision: Decision, rows: Rows) -> Decision:
    """Take rows of what hooks are shown of a decision."""
    said, dist = decision.get("policy"), decision.get("dist")
    return {
        "act": decision["act"][rows],
        "policy": Batch(said)[rows] if said else None,
        "dist": None if dist is None else get_sliced_dist(dist, rows),
        "state": policy_state.taken(decision.get("state"), rows),
    }

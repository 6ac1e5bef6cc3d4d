"""OpenSteps: the steps of a writer's environments until there are enough for a fragment."""

from __future__ import annotations

from typing import Any

from samplebatch import names
from samplebatch.batch.concat import join
from samplebatch.batch.sample_batch import SampleBatch

Environment = int | None
"""The number of an environment; None where there is but one, without a number."""


class OpenSteps:
    """The steps that a client was given one by one, until those of an environment are enough for a fragment.

    Parameters
    ----------
    count
        The steps of an environment that make a fragment; fewer do at the end of an episode.

    Examples
    --------
    >>> steps = OpenSteps(3)
    >>> for t in range(3):
    ...     steps.add(SampleBatch(obs=[t, -t], dones=[False, t == 1], env_id=[0, 1]))
    >>> steps.complete(), steps.join([0])["obs"]
    ([0, 1], array([0, 1, 2]))
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: dict[Environment, list[SampleBatch]] = {}
        self._form: Any = None
        self._added: list[Environment] = []
        """The environments of the step that was added last."""
        self._ended: set[Environment] = set()
        """Those whose episodes have ended."""

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def fits(self, rows: SampleBatch) -> bool:
        """Tell whether rows have the columns of those that are there, with the same dtypes and shapes."""
        return not self._rows or self._form == _form_of(rows)

    def add(self, rows: SampleBatch) -> None:
        """Add a step, a row for each of some environments; the rows are kept, not copied."""
        self._form = _form_of(rows)
        numbered = names.ENV_ID in rows
        self._added = rows[names.ENV_ID].tolist() if numbered else [None]
        ended = rows[names.DONES].tolist()
        for place, (environment, over) in enumerate(zip(self._added, ended, strict=True)):
            self._rows.setdefault(environment, []).append(rows[place : place + 1])
            if over:
                self._ended.add(environment)

    def undo(self) -> None:
        """Take back the step that was added last, if it is still there."""
        for environment in reversed(self._added):
            rows = self._rows.get(environment, [])
            if rows:
                rows.pop()
            if not rows:
                self._rows.pop(environment, None)
            self._ended.discard(environment)
        self._added = []

    def complete(self) -> list[Environment]:
        """Return the environments with a complete fragment: enough steps, or the end of an episode."""
        full = [one for one, rows in self._rows.items() if len(rows) >= self._count]
        return sorted({*full, *self._ended}, key=str)

    def groups(self) -> list[list[Environment]]:
        """Group all environments by the fragments that their steps go into."""
        single: list[Environment] = [None] if None in self._rows else []
        numbered: list[Environment] = [environment for environment in self._rows if environment is not None]
        return [group for group in (single, numbered) if group]

    def join(self, environments: list[Environment]) -> SampleBatch:
        """Join the steps of environments, those of each in their order."""
        return join([row for environment in environments for row in self._rows[environment]])

    def drop(self, environments: list[Environment]) -> None:
        """Forget the steps of environments, which are sent."""
        for environment in environments:
            del self._rows[environment]
            self._ended.discard(environment)
        self._added = []

    def clear(self) -> None:
        """Forget all steps."""
        self.drop(list(self._rows))


def _form_of(rows: SampleBatch) -> Any:
    """Describe the columns of rows, and how nested ones are put together."""
    columns = [(name, column.kind, column.dtype, column.row_shape) for name, column in rows._all().items()]
    return columns, rows._nested

"""SlotSteps: steps of environments, written where they will be sent from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.env.base import Environments
from samplebatch.env.infos import Infos, Rows, nothing_said, rows_of
from samplebatch.env.spaces import Columns, Layout, Leaf
from samplebatch.rollout.collector import Collector
from samplebatch.rollout.steps import Steps

_NOTHING: Mapping[str, Any] = {}


class Written(NamedTuple):
    """What is known of steps, n of all environments together, that were written to given arrays.

    Attributes
    ----------
    env_id, eps_id, t
        The environment and the episode of each step, and the steps before it in it; shape (n,).
    infos
        What the environments said, shape (n,).
    """

    env_id: npt.NDArray[np.int64]
    eps_id: npt.NDArray[np.int64]
    t: npt.NDArray[np.int64]
    infos: npt.NDArray[Any]


class SlotSteps(Steps):
    """Steps that are written to given arrays, environment by environment, as long as they fit there.

    Where all environments make every step, it is known beforehand where each step will lie in the batch. So it is
    written there at once, and never moved. Without arrays, and from the first step on that does not fit into them,
    steps are kept as in `Steps`.

    Parameters
    ----------
    num_envs, layouts
        As for `Steps`.

    Attributes
    ----------
    written
        What is known of the steps of the last `take`, if they were written to given arrays; else None.
    recorded
        The names of the columns that are written.
    """

    _views: dict[str, Leaf] | None = None

    def __init__(self, num_envs: int, layouts: Mapping[str, Layout]) -> None:
        super().__init__(num_envs, layouts)
        self._length = self._at = 0
        self.written: Written | None = None
        self.recorded: Sequence[str] = ()

    def open(self, columns: Mapping[str, Leaf], length: int) -> None:
        """Let the next steps be written to arrays of shape (num_envs * length, ...)."""
        count = len(self._all)
        self._views = {name: column.reshape(count, length, *column.shape[1:]) for name, column in columns.items()}
        self._length, self._at = length, 0

    def append(self, values: Columns, infos: Infos, envs: Rows | None = None, drop: Rows | None = None) -> None:
        """Take down a step; see `Steps.append`."""
        parts = {name: [column] for name, column in values.items()}
        if envs is None and drop is None and self._write(parts, {0: infos} if infos else {}):
            return
        self._leave()
        super().append(values, infos, envs, drop)

    def extend(
        self,
        parts: Mapping[str, Sequence[Leaf]],
        infos: Mapping[int, Infos],
        drop: Rows | None = None,
        later: Mapping[str, tuple[Rows, Leaf]] | None = None,
    ) -> None:
        """Take down several steps; see `Steps.extend`."""
        if drop is None and self._write(parts, infos, later or {}):
            return
        self._leave()
        super().extend(parts, infos, drop, later)

    def _write(
        self,
        parts: Mapping[str, Sequence[Leaf]],
        infos: Mapping[int, Infos],
        later: Mapping[str, tuple[Rows, Leaf]] = _NOTHING,
    ) -> bool:
        """Write steps to their places, and tell whether they fit there; if not, nothing is written."""
        views, at, count = self._views, self._at, len(self._all)
        steps = len(parts[names.REWARDS])
        if views is None or at + steps > self._length or parts.keys() != views.keys():
            return False
        if not all(self._fits(views[name], arrays) for name, arrays in parts.items()):
            return False
        for name, view in views.items():
            np.stack(parts[name], 1, out=view[:, at : at + steps])
        for name, (rows, values) in later.items():
            views[name][rows % count, at + rows // count] = values
        self._infos += [((at + place) * count, rows_of(said, count)) for place, said in infos.items()]
        self._at = at + steps
        self.kept += count * steps
        return True

    def _fits(self, view: Leaf, arrays: Sequence[Leaf]) -> bool:
        shape, dtype = (len(self._all), *view.shape[2:]), view.dtype
        return all(array.shape == shape and array.dtype == dtype for array in arrays)

    def _leave(self) -> None:
        """Take what was written to given arrays out of them again."""
        views, self._views = self._views, None
        if views is not None:
            for at in range(self._at):
                self._rows.append({name: view[:, at] for name, view in views.items()}, len(self._all))

    def take(self, *, batch: bool = True, **constants: int) -> tuple[Any, npt.NDArray[Any], npt.NDArray[Any]]:
        """Start anew, and return what `Steps.take` does, but no batch of steps that were written to given arrays."""
        views = self._views
        self.written = None
        if views is None or self._at != self._length:
            self._leave()
            self.recorded = tuple(self._rows.columns())
            return super().take(batch=batch, **constants)
        self._views = None
        count, length = len(self._all), self._length
        flags = views[names.TERMINATEDS] | views[names.TRUNCATEDS]
        counted = self._count.add(self._all.repeat(length), flags.ravel(), views[names.REWARDS].ravel())
        infos = nothing_said(count * length)
        for start, said in self._infos:
            infos[start : start + len(said)] = said
        self.written = Written(
            counted.env_id, counted.eps_id, counted.t, infos.reshape(length, count).transpose().ravel()
        )
        self._start()
        return None, counted.returns, counted.lens


class SlotCollector(Collector):
    """A `Collector` that can write steps to given arrays.

    Parameters
    ----------
    policy
        As for `Collector`.
    environments
        What is stepped.
    env_seeds
        The seed of each environment's first reset.
    seed, first_unroll_id
        As for `Collector`.
    first_env_id
        The `env_id` of the first environment; those after it count on.

    Attributes
    ----------
    steps
        Where they are written.
    """

    def __init__(
        self,
        policy: Any,
        environments: Environments,
        *,
        env_seeds: Sequence[int],
        seed: np.random.SeedSequence,
        first_unroll_id: int,
        first_env_id: int,
    ) -> None:
        super().__init__(policy, environments, seed=seed, first_unroll_id=first_unroll_id)
        self._seeds = env_seeds
        self._env_ids = first_env_id + np.arange(self.num_envs)
        observations, actions = environments.observations, environments.actions
        layouts = {names.OBS: observations, names.NEXT_OBS: observations, names.ACTIONS: actions}
        self.steps = SlotSteps(self.num_envs, layouts)
        self._recorder.steps = self.steps

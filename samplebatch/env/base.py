"""Base class of single-agent environment adapters, and the step results that adapters return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy import count_nonzero

from samplebatch import names
from samplebatch.column.casting import Refuse
from samplebatch.env.environment_state import load_environments, save_environments
from samplebatch.env.infos import Infos, Rows
from samplebatch.env.spaces import Leaf, SpaceLayout, column_names
from samplebatch.env.stacking import join_alike, join_steps
from samplebatch.errors import EnvironmentSpecError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_NONE_TYPES = {type(None)}

OUTCOMES = (names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS)
"""Columns of every step besides observations."""


class StepResult(NamedTuple):
    """Arrays of one or more steps of n environments, in time order.

    - `steps`: number of steps. Arrays of a single step may be owned by the environment.
    - `new_obs`: arrays of shape (steps * n, ...), one per leaf.
    - `rewards`, `terminateds`, `truncateds`: arrays of shape (steps * n,) and dtypes float64, bool and bool.
    - `infos`: infos of each step by step number; steps without infos may be omitted.
    - `autoreset`: rows of autoreset steps, which are not transitions; None if there are no autoreset steps.
    """

    steps: int
    new_obs: Sequence[Leaf]
    rewards: Floats
    terminateds: Flags
    truncateds: Flags
    infos: dict[int, Any]
    autoreset: Rows | None

    def ends(self) -> Flags:
        """Return whether each transition ended its episode, shape (steps, n)."""
        ends = self.terminateds | self.truncateds
        if self.autoreset is not None:
            ends[self.autoreset] = False
        return ends.reshape(self.steps, -1)


def join_outcomes(
    rewards: Sequence[Floats], terminateds: Sequence[Flags], truncateds: Sequence[Flags]
) -> tuple[Floats, Flags, Flags]:
    """Concatenate the rewards and flags of several steps, arrays of shape (n,) each, in the dtypes of their columns.

    >>> join_outcomes(
    ...     [np.zeros(1), np.ones(1)], [np.array([False])] * 2, [np.array([True])] * 2
    ... )
    (array([0., 1.]), array([False, False]), array([ True,  True]))
    """
    return (
        join_alike(names.REWARDS, rewards),
        join_alike(names.TERMINATEDS, terminateds),
        join_alike(names.TRUNCATEDS, truncateds),
    )


def refuse_mask(arguments: Mapping[str, Any]) -> None:
    """Reject arguments of `reset` that exclude environments, because collectors reset all environments.

    Raises EnvironmentSpecError if the options contain a `reset_mask`.
    """
    if "reset_mask" in (arguments.get("options") or {}):
        raise EnvironmentSpecError("options must have no 'reset_mask', because a collector resets all environments")


class Environments(ABC):
    """Base class of adapters that step all environments together; later steps do not change returned arrays.

    - `env`: the environment object that is stepped: a vector environment, or a list of environments.
    - `num_envs`: number of environments.
    - `observation_space`, `action_space`: spaces of one environment.
    - `observations`, `actions`: layouts of the spaces.
    - `resets_later`: whether an environment is reset in a separate autoreset step after its episode, instead of after
      the last step.
    - `keeps_seeds`: whether a collector without a seed resets the environments without seeds, so that existing seeds
      remain in effect.
    - `made`: number of calls to `step_raw` since all environments were reset, for error messages.
    """

    resets_later = False
    keeps_seeds = False
    _resets: Flags | None = None
    """Environments that the next step resets; None if there are none."""
    _saved_names: ClassVar[Sequence[str]] = ("made",)
    """Attributes in the state besides the environments."""

    def __init__(self, env: Any, num_envs: int, observation_space: Any, action_space: Any) -> None:
        self.env = env
        self.num_envs = num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.observations, self.actions = SpaceLayout(observation_space), SpaceLayout(action_space)
        self._new_names = column_names(names.NEXT_OBS, self.observations)
        self.made = 0

    def refuse(self, sentence: str, env: int | None) -> EnvironmentSpecError:
        """Create the error for an invalid value returned by the last step or reset."""
        whose = "" if env is None else f" from environment {env}"
        return EnvironmentSpecError(f"{sentence}{whose} in {f'step {self.made}' if self.made else 'a reset'}")

    def refusing(self, *envs: int) -> Refuse:
        """Return a function that creates errors for invalid rows, where row i belongs to environment `envs[i]`."""
        return lambda sentence, row: self.refuse(sentence, None if row is None else envs[row])

    @abstractmethod
    def reset(self, *, seeds: Sequence[int] | None = None, **arguments: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment.

        - `seeds`: one seed per environment; None continues the generators of the environments.
        - `**arguments`: further arguments of the environments' `reset`; a `seed` has precedence over `seeds`.
        """

    @abstractmethod
    def step_raw(self, actions: Sequence[Leaf]) -> Sequence[Any]:
        """Step every environment; actions are passed as leaves of shape (n, ...).

        `finish_chunk` converts the results of several steps in one operation. The first five items of the result are
        the leaves of the new observations, the rewards, the termination flags, the truncation flags, and the infos. The
        sixth item is the mask of environments that were reset instead of stepped, shape (n,); None if no environment
        was reset. Callers may read only the flags in the result, each of shape (n,). The flags may also be set in
        autoreset steps.
        """

    def next_obs(self, step: Any) -> tuple[Sequence[Leaf], Infos]:
        """Return the observations and infos for the next action from an unconverted result of `step_raw`."""
        return step[0], step[4]

    def _note_ends(self, terminateds: Flags, truncateds: Flags) -> None:
        ended = terminateds | truncateds
        if self._resets is not None:
            # Autoreset steps may have flags as well.
            ended &= ~self._resets
        self._resets = ended if count_nonzero(ended) else None

    @property
    def to_reset(self) -> int:
        """Number of environments that the next step resets instead of stepping."""
        return 0 if self._resets is None else int(count_nonzero(self._resets))

    def finish_chunk(self, steps: Sequence[Any]) -> StepResult:
        """Convert the results of one or more steps to a `StepResult`.

        - `steps`: results of all calls to `step_raw` since the last chunk; at least one result.
        """
        if len(steps) == 1:
            obs, reward, terminated, truncated, info, resets, *_ = steps[0]
            autoreset = None if resets is None else resets.nonzero()[0]
            return StepResult(1, obs, reward, terminated, truncated, {0: info} if info else {}, autoreset)
        new_obs, rewards, terminateds, truncateds, infos, masks, *_ = zip(*steps, strict=True)
        infos_by_step = {step: step_infos for step, step_infos in enumerate(infos) if step_infos}
        leaves = [
            join_steps(name, blocks) for name, blocks in zip(self._new_names, zip(*new_obs, strict=True), strict=True)
        ]
        outcomes = join_outcomes(rewards, terminateds, truncateds)
        return StepResult(len(steps), leaves, *outcomes, infos_by_step, self._autoreset_rows(masks))

    def _autoreset_rows(self, masks: Sequence[Flags | None]) -> Rows | None:
        if {*map(type, masks)} == _NONE_TYPES:
            return None
        no_resets = np.zeros(self.num_envs, np.bool_)
        rows: Rows = join_alike("autoreset", [no_resets if mask is None else mask for mask in masks]).nonzero()[0]
        return rows

    def _parts(self) -> list[Any]:
        """Return the objects that are pickled as the state of the environments."""
        return [self.env]

    def state_dict(self) -> dict[str, Any]:
        """Return the picklable state of the environments, for `load_state_dict`."""
        return {"saved": save_environments(self._parts()), **{name: getattr(self, name) for name in self._saved_names}}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore environments from `state_dict`; return whether the environments were restored.

        If the state contains no pickled environments, nothing is changed, and the environments must be reset.

        Raises EnvironmentSpecError if the classes of the environments differ from the classes in the saved state.
        """
        if not load_environments(self._parts(), state["saved"]):
            return False
        for name in self._saved_names:
            setattr(self, name, state[name])
        return True

    def render_all(self) -> None:
        """Render every environment."""
        self.env.render()

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

"""Gymnasium's environments, one or many at once, behind one interface.

After an episode has ended, Gymnasium's vector environments go on in one of three ways, which the classes here make one:
every step is a transition or void, and says both what it led to and what comes next.

============  ====================================================  ====================================================
autoreset     what Gymnasium does                                   what is made of it
============  ====================================================  ====================================================
next step     the following step resets; its action is ignored,     that step is void: no transition
              its reward 0
same step     resets at once; the last observation and info are     they are put back where they belong
              among the infos
disabled      nothing                                               the environments that ended are reset at once
============  ====================================================  ====================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.errors import EnvironmentSpecError, require
from samplebatch.rollout.spaces import Layout, Leaf
from samplebatch.rollout.vector_infos import Infos, Rows, copied, replaced, with_finals, without_finals

_BOOL, _FLOAT = np.dtype(np.bool_), np.dtype(np.float64)
_count = np.count_nonzero


class Transition(NamedTuple):
    """One step of n environments.

    Attributes
    ----------
    new_obs
        What each step led to, a leaf of the observations at a time; where an episode ended, its last observation.
    rewards, terminateds, truncateds, infos
        As the environments gave them: float64, bool, bool, each of shape (n,).
    ended
        Environments whose episode ended; None if none did.
    void
        Environments that were reset instead of stepped: no transition of theirs is in it; None for none.
    obs
        What to act on next: `new_obs`, but the first observation of the new episode where one has begun.
    obs_infos
        What was said with `obs`.
    """

    new_obs: Sequence[Leaf]
    rewards: npt.NDArray[np.float64]
    terminateds: npt.NDArray[np.bool_]
    truncateds: npt.NDArray[np.bool_]
    infos: Infos
    ended: Rows | None
    void: Rows | None
    obs: Sequence[Leaf]
    obs_infos: Infos


Outcome = tuple[Sequence[Leaf], npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], Infos]
"""The first five of a `Transition`: what steps led to."""


class Environments(ABC):
    """Environments that are stepped together; the arrays they hand out are not changed by later steps.

    Attributes
    ----------
    env
        What is stepped.
    num_envs
        How many environments there are.
    observation_space, action_space
        The spaces of one environment.
    observations, actions
        Their layouts.
    resets_later
        Whether an environment is reset in a void step after its episode ended, not with its last step.
    """

    resets_later = False

    def __init__(self, env: Any, num_envs: int, observation_space: Any, action_space: Any) -> None:
        self.env = env
        self.num_envs = num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.observations, self.actions = Layout(observation_space), Layout(action_space)

    @abstractmethod
    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment.

        Parameters
        ----------
        seeds
            A seed for each environment; None leaves their generators running.
        **given
            Further arguments of the environment's own `reset`; a `seed` among them takes precedence.
        """

    @abstractmethod
    def step(self, actions: Sequence[Leaf]) -> Transition:
        """Step every environment, given the leaves of the actions, each of shape (n, ...)."""

    def advance(self, actions: Sequence[Leaf]) -> tuple[Any, Sequence[Leaf], Infos]:
        """Step every environment, and leave for later what can wait.

        Returns
        -------
        step
            What is to be given to `settle`.
        obs, infos
            What to act on next, as in a `Transition`.
        """
        step = self.step(actions)
        return step, step.obs, step.obs_infos

    def settle(self, steps: Sequence[Any]) -> tuple[Sequence[Outcome], Rows | None]:
        """Work out what steps that `advance` made led to.

        Parameters
        ----------
        steps
            What `advance` returned, of all steps since the last that `step` or `settle` knows of; not empty.

        Returns
        -------
        outcomes
            What each led to.
        void
            Rows of all of them, one step after the other, that are no transitions; None for none.
        """
        return [step[:5] for step in steps], None

    def close(self) -> None:
        """Let go of what the environments hold."""
        self.env.close()


class SingleEnvironment(Environments):
    """One Gymnasium environment, reset as soon as its episode has ended."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, 1, env.observation_space, env.action_space)

    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode; see `Environments.reset`."""
        if seeds is not None:
            given.setdefault("seed", seeds[0])
        obs, info = self.env.reset(**given)
        return self.observations.flatten_one(obs), [info]

    def step(self, actions: Sequence[Leaf]) -> Transition:
        """Step the environment; see `Environments.step`."""
        obs, reward, terminated, truncated, info = self.env.step(self.actions.nest([leaf[0] for leaf in actions]))
        new_obs = self.observations.flatten_one(obs)
        # The environment may go on in the same dict.
        info = dict(info)
        outcome = (
            np.array([reward], np.float64).reshape(1),
            np.array([terminated], np.bool_),
            np.array([truncated], np.bool_),
        )
        if not terminated and not truncated:
            return Transition(new_obs, *outcome, [info], None, None, new_obs, [info])
        return Transition(new_obs, *outcome, [info], np.zeros(1, np.intp), None, *self.reset())


class VectorEnvironments(Environments):
    """A vector environment of Gymnasium's, which resets its environments by itself or not at all."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)
        inner = getattr(env, "unwrapped", env)
        self._copies = getattr(inner, "copy", False) is not True
        self._seeds_each = hasattr(inner, "env_fns")
        # What there is to look at in a step: one array of observations, of a dtype that is known, and one of actions.
        self._flat = self.observations.plain and self.actions.plain
        self._obs_dtype = np.dtype(self.observation_space.dtype) if self._flat else None

    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; see `Environments.reset`."""
        if seeds is not None:
            given.setdefault("seed", list(seeds) if self._seeds_each else seeds[0])
        obs, infos = self.env.reset(**given)
        return self._own(obs), infos

    def _own(self, obs: Any) -> Sequence[Leaf]:
        """Take observations apart into arrays of their spaces' dtypes that the environment will not write to."""
        leaves = self.observations.flatten(obs)
        for place, (leaf, space) in enumerate(zip(leaves, self.observations.spaces, strict=True)):
            if leaf.dtype != space.dtype and not leaf.dtype.hasobject:
                leaves[place] = leaf.astype(space.dtype)
            elif self._copies:
                leaves[place] = leaf.copy()
        return leaves

    def _stepped(self, actions: Sequence[Leaf]) -> tuple[Sequence[Leaf], Any, Any, Any, Any]:
        obs, rewards, terminateds, truncateds, infos = self.env.step(
            actions[0] if self._flat else self.actions.nest(actions)
        )
        if rewards.dtype is not _FLOAT or terminateds.dtype is not _BOOL or truncateds.dtype is not _BOOL:
            rewards, terminateds, truncateds = (
                rewards.astype(_FLOAT),
                terminateds.astype(_BOOL),
                truncateds.astype(_BOOL),
            )
        if self._copies:
            rewards, terminateds, truncateds = rewards.copy(), terminateds.copy(), truncateds.copy()
            infos = copied(infos)
        elif self._flat and obs.dtype is self._obs_dtype:
            return [obs], rewards, terminateds, truncateds, infos
        return self._own(obs), rewards, terminateds, truncateds, infos


class NextStepEnvironments(VectorEnvironments):
    """A vector environment that resets an environment in the step after its episode ended."""

    resets_later = True
    _resetting: Rows | None = None

    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; see `Environments.reset`."""
        self._resetting = None
        return super().reset(seeds=seeds, **given)

    def step(self, actions: Sequence[Leaf]) -> Transition:
        """Step every environment; see `Environments.step`."""
        obs, rewards, terminateds, truncateds, infos = self._stepped(actions)
        void = self._resetting
        done = terminateds | truncateds
        if void is not None:
            done[void] = False
        ended = self._resetting = done.nonzero()[0] if _count(done) else None
        return Transition(obs, rewards, terminateds, truncateds, infos, ended, void, obs, infos)

    def advance(self, actions: Sequence[Leaf]) -> tuple[Any, Sequence[Leaf], Infos]:
        """Step every environment; see `Environments.advance`."""
        step = self._stepped(actions)
        return step, step[0], step[4]

    def settle(self, steps: Sequence[Outcome]) -> tuple[Sequence[Outcome], Rows | None]:
        """Find the steps that were none; see `Environments.settle`."""
        done = np.concatenate([step[2] for step in steps]) | np.concatenate([step[3] for step in steps])
        # Shifted by one step: an environment is reset in the step after the one that ended its episode.
        void = np.zeros(len(done) + self.num_envs, np.bool_)
        if self._resetting is not None:
            void[self._resetting] = True
        by_step, ends = void.reshape(-1, self.num_envs), done.reshape(-1, self.num_envs)
        for place in ends.any(1).nonzero()[0].tolist():
            by_step[place + 1] = ends[place] & ~by_step[place]
        last = by_step[-1].nonzero()[0]
        self._resetting = last if len(last) else None
        rows = void[: len(done)].nonzero()[0]
        return steps, rows if len(rows) else None


class SameStepEnvironments(VectorEnvironments):
    """A vector environment that resets an environment in the very step in which its episode ended."""

    def step(self, actions: Sequence[Leaf]) -> Transition:
        """Step every environment; see `Environments.step`.

        Raises
        ------
        EnvironmentSpecError
            If an environment whose episode ended does not give its last observation.
        """
        step = self._stepped(actions)
        obs, rewards, terminateds, truncateds, infos = step
        done = terminateds | truncateds
        if not _count(done):
            return Transition(obs, rewards, terminateds, truncateds, infos, None, None, obs, infos)
        ended = done.nonzero()[0]
        return Transition(*self._with_finals(step, ended), ended, None, obs, without_finals(infos))

    def advance(self, actions: Sequence[Leaf]) -> tuple[Any, Sequence[Leaf], Infos]:
        """Step every environment; see `Environments.advance`."""
        step = self._stepped(actions)
        return step, step[0], without_finals(step[4]) if step[4] else step[4]

    def settle(self, steps: Sequence[Outcome]) -> tuple[Sequence[Outcome], Rows | None]:
        """Put the last observations of episodes where they belong; see `Environments.settle`.

        Raises
        ------
        EnvironmentSpecError
            As `step` does.
        """
        done = np.concatenate([step[2] for step in steps]) | np.concatenate([step[3] for step in steps])
        done = done.reshape(len(steps), self.num_envs)
        settled = list(steps)
        for place in done.any(1).nonzero()[0].tolist():
            settled[place] = self._with_finals(steps[place], done[place].nonzero()[0])
        return settled, None

    def _with_finals(self, step: Outcome, ended: Rows) -> Outcome:
        """Return what a step led to, with the last observations and infos of the episodes that ended."""
        obs, rewards, terminateds, truncateds, infos = step
        if not isinstance(infos, dict) or (finals := infos.get("final_obs")) is None:
            raise EnvironmentSpecError(
                "a vector environment that resets in the same step must give the last observations of episodes as "
                "infos['final_obs'], and gave none"
            )
        new_obs = [leaf.copy() for leaf in obs]
        if self._flat:
            for row in ended.tolist():
                new_obs[0][row] = finals[row]
        else:
            for row in ended.tolist():
                for leaf, final in zip(new_obs, self.observations.flatten_one(finals[row]), strict=True):
                    leaf[row] = final[0]
        return new_obs, rewards, terminateds, truncateds, with_finals(infos, ended, self.num_envs)


class DisabledEnvironments(VectorEnvironments):
    """A vector environment that resets nothing by itself; environments whose episode ended are reset at once."""

    def step(self, actions: Sequence[Leaf]) -> Transition:
        """Step every environment; see `Environments.step`."""
        obs, rewards, terminateds, truncateds, infos = self._stepped(actions)
        done = terminateds | truncateds
        if not _count(done):
            return Transition(obs, rewards, terminateds, truncateds, infos, None, None, obs, infos)
        ended = done.nonzero()[0]
        begun, said = self.env.reset(options={"reset_mask": done})
        begun = self._own(begun)
        said = replaced(infos, said, ended, self.num_envs)
        return Transition(obs, rewards, terminateds, truncateds, infos, ended, None, begun, said)


_BY_MODE: dict[str, type[VectorEnvironments]] = {
    "NextStep": NextStepEnvironments,
    "SameStep": SameStepEnvironments,
    "Disabled": DisabledEnvironments,
}


def as_environments(env: Any) -> Environments:
    """Put a Gymnasium environment or vector environment behind the one interface.

    Raises
    ------
    EnvironmentSpecError
        If it is neither.

    Examples
    --------
    >>> import gymnasium
    >>> environments = as_environments(gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync"))
    >>> type(environments).__name__, environments.num_envs
    ('NextStepEnvironments', 3)
    """
    if isinstance(env, Environments):
        return env
    gymnasium = require("gymnasium", "envs")
    vector = require("gymnasium.vector", "envs")
    if isinstance(env, gymnasium.Env):
        return SingleEnvironment(env)
    if not isinstance(env, vector.VectorEnv):
        raise EnvironmentSpecError(
            f"env must be a Gymnasium environment or vector environment, got a {type(env).__name__}; "
            "put several environments into a gymnasium.vector.SyncVectorEnv"
        )
    return _BY_MODE[_mode(env)](env)


def _mode(env: Any) -> str:
    # The metadata belong to the environments' class: vector environments of one class share them, whatever their mode.
    mode = getattr(getattr(env, "unwrapped", env), "autoreset_mode", None) or env.metadata.get("autoreset_mode")
    word = str(getattr(mode, "value", mode or "NextStep"))
    if word not in _BY_MODE:
        raise EnvironmentSpecError(f"autoreset must be one of {', '.join(_BY_MODE)}, got {word}")
    return word

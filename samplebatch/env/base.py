"""Environments that are stepped together, whatever they are; and a single one, which is the simplest case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from samplebatch.column.exact import BOOL, FLOAT, Refuse
from samplebatch.env.infos import Infos
from samplebatch.env.spaces import Layout, Leaf
from samplebatch.env.stepper import EnvironmentStepper
from samplebatch.env.transitions import Outcomes, Transition
from samplebatch.errors import EnvironmentSpecError


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
    made
        Calls of the environment's `step` since all environments were reset, which errors name.
    """

    resets_later = False

    def __init__(self, env: Any, num_envs: int, observation_space: Any, action_space: Any) -> None:
        self.env = env
        self.num_envs = num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.observations, self.actions = Layout(observation_space), Layout(action_space)
        self.made = 0

    def refuse(self, sentence: str, env: int | None) -> EnvironmentSpecError:
        """Make the error for a value that an environment returned in the newest step, or in a reset."""
        whose = "" if env is None else f" from environment {env}"
        return EnvironmentSpecError(f"{sentence}{whose} in {f'step {self.made}' if self.made else 'a reset'}")

    def refusing(self, *envs: int) -> Refuse:
        """Make errors for values of which row i is from environment `envs[i]`."""
        return lambda sentence, row: self.refuse(sentence, None if row is None else envs[row])

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

    def advance(self, actions: Sequence[Leaf]) -> Sequence[Any]:
        """Step every environment, and leave for `settle` what can wait.

        Of what is returned, the third and the fourth part say which episodes were terminated or truncated; a void step
        may say so, too.
        """
        return self.step(actions)

    def next(self, step: Any) -> tuple[Sequence[Leaf], Infos]:
        """Return what to act on after what `advance` returned, and what was said with it."""
        return step.obs, step.obs_infos

    def settle(self, steps: Sequence[Any]) -> Outcomes:
        """Work out what steps that `advance` made led to.

        Parameters
        ----------
        steps
            What `advance` returned, of all steps since the last that `step` or `settle` knows of; not empty.
        """
        new_obs, rewards, terminateds, truncateds, infos, *_ = zip(*steps, strict=True)
        spoken = {place: said for place, said in enumerate(infos) if any(said)}
        return Outcomes(list(zip(*new_obs, strict=True)), rewards, terminateds, truncateds, spoken, None, None)

    def close(self) -> None:
        """Let go of what the environments hold."""
        self.env.close()


class SingleEnvironment(Environments):
    """One Gymnasium environment, reset as soon as its episode has ended."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, 1, env.observation_space, env.action_space)
        self._stepper = EnvironmentStepper(env)

    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode; see `Environments.reset`."""
        if seeds is not None:
            given.setdefault("seed", seeds[0])
        obs, info = self._stepper.reset(**given)
        return obs, [info]

    def step(self, actions: Sequence[Leaf]) -> Transition:
        """Step the environment; see `Environments.step`."""
        step = self._stepper.step(self.actions.nest([leaf[0] for leaf in actions]))
        new_obs, reward, terminated, truncated, info = step
        outcome = (np.array([reward], FLOAT), np.array([terminated], BOOL), np.array([truncated], BOOL))
        if not step.ended:
            return Transition(new_obs, *outcome, [info], None, None, new_obs, [info])
        obs, said = self._stepper.begin_episode()
        return Transition(new_obs, *outcome, [info], np.zeros(1, np.intp), None, obs, [said])

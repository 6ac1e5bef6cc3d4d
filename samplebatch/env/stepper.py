"""EnvironmentStepper: one Gymnasium environment whose values are converted exactly, in any process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from samplebatch import names
from samplebatch.column.exact import BOOL, FLOAT, exact_number
from samplebatch.env.spaces import Leaf, SpaceLayout
from samplebatch.errors import EnvironmentSpecError


class SingleStep(NamedTuple):
    """One step of one environment, as `EnvironmentStepper.step` returns it to adapters.

    Attributes
    ----------
    new_obs
        The leaves of the observation, each of shape (1, ...).
    reward, terminated, truncated
        A float and two flags, Python's or NumPy's.
    info
        The info, in a dict of its own.
    """

    new_obs: Sequence[Leaf]
    reward: Any
    terminated: Any
    truncated: Any
    info: dict[str, Any]

    @property
    def ended(self) -> bool:
        """Whether the episode ended with this step."""
        return bool(self.terminated or self.truncated)


class EnvironmentStepper:
    """One Gymnasium environment, reset and stepped for the adapters of single environments.

    The arrays that it returns are their caller's: the environment may write to its own again.

    Parameters
    ----------
    env
        A `gymnasium.Env`.
    index
        The number of the environment, which errors name.

    Attributes
    ----------
    env
        As given.
    observations, actions
        The layouts of its spaces.

    Examples
    --------
    >>> import gymnasium
    >>> stepper = EnvironmentStepper(gymnasium.make("CartPole-v1"))
    >>> obs, _ = stepper.reset(seed=1)
    >>> step = stepper.step(0)
    >>> step.new_obs[0].shape, step.reward, step.ended
    ((1, 4), 1.0, False)
    """

    def __init__(self, env: Any, index: int = 0) -> None:
        self.env = env
        self.observations, self.actions = SpaceLayout(env.observation_space), SpaceLayout(env.action_space)
        self._index = index
        self._made = 0
        self._resets = True

    def reset(self, **given: Any) -> tuple[Sequence[Leaf], dict[str, Any]]:
        """Reset the environment on demand, and count its steps from 1 again.

        Parameters
        ----------
        **given
            Arguments of the environment's own `reset`.

        Returns
        -------
        The leaves of the observation, and the info.

        Raises
        ------
        EnvironmentSpecError
            If the observation does not fit its space; names the column and the environment.
        """
        self._made = 0
        return self.begin_episode(**given)

    def begin_episode(self, **given: Any) -> tuple[Sequence[Leaf], dict[str, Any]]:
        """Reset the environment after an episode; see `reset`, but steps are counted on."""
        self._resets = True
        obs, info = self.env.reset(**given)
        return self._flatten(obs), dict(info)

    def step(self, action: Any) -> SingleStep:
        """Step the environment.

        Parameters
        ----------
        action
            An action, nested as its space has it.

        Raises
        ------
        EnvironmentSpecError
            If a value would change in its column; names the column, the environment and the step.
        """
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._resets = False
        self._made += 1
        refuse = self._refuse
        return SingleStep(
            self._flatten(obs),
            exact_number(names.REWARDS, reward, FLOAT, refuse),
            exact_number(names.TERMINATEDS, terminated, BOOL, refuse),
            exact_number(names.TRUNCATEDS, truncated, BOOL, refuse),
            dict(info),
        )

    def _flatten(self, obs: Any) -> Sequence[Leaf]:
        return self.observations.flatten_one(obs, names.OBS, self._refuse)

    def _refuse(self, sentence: str, row: int | None) -> EnvironmentSpecError:
        """Make the error for a value of the newest step or reset."""
        after = f"the reset after step {self._made}" if self._made else "a reset"
        where = after if self._resets else f"step {self._made}"
        return EnvironmentSpecError(f"{sentence} from environment {self._index} in {where}")

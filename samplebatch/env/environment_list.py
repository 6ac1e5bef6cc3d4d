"""EnvironmentList: single Gymnasium environments that are stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Any

from numpy import count_nonzero

from samplebatch import names
from samplebatch.column.exact import Refuse, exact_outcomes
from samplebatch.env.base import Environments, Flags, Floats
from samplebatch.env.infos import Infos
from samplebatch.env.seeds import seeds_of_reset
from samplebatch.env.spaces import Leaf, SpaceLayout, column_names, put
from samplebatch.errors import EnvironmentSpecError, require

Info = dict[str, Any]
StepParts = tuple[list[Leaf], Floats, Flags, Flags, list[Info], Flags | None]
"""New observations by leaf, rewards, flags, infos, none where no environment says anything, and autoreset steps."""


class EnvironmentList(Environments):
    """One or many single Gymnasium environments, stepped one after the other by a collector or a worker.

    An environment whose episode ended is reset at once, or by the next step if the adapter `resets_later`. Values of a
    step are converted together, and exactly; the environments may write to their own arrays and infos again.

    Parameters
    ----------
    envs
        The environments, with equal spaces.

    Raises
    ------
    EnvironmentSpecError
        If there are none, one is no Gymnasium environment or is there twice, or their spaces differ.

    Examples
    --------
    >>> import gymnasium, numpy as np
    >>> environments = EnvironmentList([gymnasium.make("CartPole-v1") for _ in range(3)])
    >>> obs, _ = environments.reset(seeds=[1, 2, 3])
    >>> new_obs, rewards, *_ = environments.step_raw([np.array([0, 1, 0])])
    >>> new_obs[0].shape, rewards
    ((3, 4), array([1., 1., 1.]))
    >>> environments.close()
    """

    def __init__(self, envs: Iterable[Any]) -> None:
        self._envs = list(envs)
        _check_environments(self._envs)
        first = self._envs[0]
        super().__init__(self._envs, len(self._envs), first.observation_space, first.action_space)
        self._resetting = False

    def refuse(self, sentence: str, env: int | None) -> EnvironmentSpecError:
        """Make the error for a value of the newest step or reset; see `Environments.refuse`."""
        if not (self._resetting and self.made):
            return super().refuse(sentence, env)
        return EnvironmentSpecError(f"{sentence} from environment {env} in the reset after step {self.made}")

    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; see `Environments.reset`.

        Raises
        ------
        EnvironmentSpecError
            If there are not as many seeds as environments, or a value would change in its column.
        """
        numbers = seeds_of_reset(self.num_envs, seeds, given.pop("seed", None))
        self.made = 0
        seeded = [given if number is None else {"seed": number, **given} for number in numbers]
        return self._reset(range(self.num_envs), seeded)

    def _reset(self, envs: Sequence[int], given: Iterable[dict[str, Any]]) -> tuple[list[Leaf], list[Info]]:
        """Reset k environments, each with arguments of its own."""
        self._resetting = True
        returned = [self._envs[env].reset(**own) for env, own in zip(envs, given, strict=False)]
        refuse = self.refusing(*envs)
        obs, infos = take_apart("reset", returned, 2, refuse)
        said = _copy_infos(infos, refuse) if any(infos) else []
        begun = self.observations.flatten_each(obs, names.OBS, refuse), said
        self._resetting = False
        return begun

    def step_raw(self, actions: Sequence[Leaf]) -> StepParts:
        """Step every environment; see `Environments.step_raw`.

        Raises
        ------
        EnvironmentSpecError
            If a value would change in its column; names the column, the environment and the step.
        """
        rows = actions[0] if self.actions.plain else self.actions.nest_each(actions, self.num_envs)
        resets = self._resets
        if resets is None:
            returned = [env.step(action) for env, action in zip(self._envs, rows, strict=True)]
        else:
            asked = zip(resets.tolist(), self._envs, rows, strict=True)
            returned = [self._begin(env) if due else own.step(action) for env, (due, own, action) in enumerate(asked)]
        self.made += 1
        refuse = self.refuse
        obs, rewards, terminateds, truncateds, infos = take_apart("step", returned, 5, refuse)
        leaves = self.observations.flatten_each(obs, names.OBS, refuse)
        outcomes = exact_outcomes(rewards, terminateds, truncateds, refuse)
        said = _copy_infos(infos, refuse) if any(infos) else []
        if self.resets_later:
            self._note_ends(*outcomes[1:])
        return leaves, *outcomes, said, resets

    def _begin(self, env: int) -> tuple[Any, ...]:
        """Reset an environment in an autoreset step: it is paid nothing there."""
        self._resetting = True
        (obs,), (info,) = take_apart("reset", [self._envs[env].reset()], 2, self.refusing(env))
        self._resetting = False
        return obs, 0.0, False, False, info

    def next_obs(self, step: StepParts) -> tuple[Sequence[Leaf], Infos]:
        """Reset environments at the ends of episodes, and return all next observations; see `Environments.next_obs`.

        A reset that fails costs no step, as the collector has that by now.

        Raises
        ------
        EnvironmentSpecError
            If the observation of a reset does not fit its space.
        """
        new_obs, _, terminateds, truncateds, said, _ = step
        if self.resets_later:
            return new_obs, said
        done = terminateds | truncateds
        if not count_nonzero(done):
            return new_obs, said
        ended = done.nonzero()[0]
        first_obs, first_said = self._reset(ended.tolist(), repeat({}))
        obs = [put(leaf.copy(), ended, first) for leaf, first in zip(new_obs, first_obs, strict=True)]
        if not (said or first_said):
            return obs, said
        infos = list(said) or [{} for _ in range(self.num_envs)]
        for env, info in zip(ended.tolist(), first_said or repeat({}), strict=False):
            infos[env] = info
        return obs, infos

    def _parts(self) -> list[Any]:
        return self._envs

    def render_all(self) -> None:
        """Render every environment."""
        for env in self._envs:
            env.render()

    def close(self) -> None:
        """Close every environment, also if one of them raises."""
        with ExitStack() as stack:
            for env in reversed(self._envs):
                stack.callback(env.close)


def take_apart(method: str, returned: Sequence[Any], count: int, refuse: Refuse) -> Sequence[tuple[Any, ...]]:
    """Return the values that environments returned as `count` tuples, each with an item an environment.

    Raises
    ------
    EnvironmentSpecError
        If one has returned another number of values.
    """
    try:
        parts = tuple(zip(*returned, strict=True))
    except (TypeError, ValueError):
        parts = ()
    if len(parts) == count:
        return parts
    for row, one in enumerate(returned):
        if not isinstance(one, tuple | list) or len(one) != count:
            got = len(one) if isinstance(one, tuple | list) else f"a single {type(one).__name__}"
            raise refuse(f"{method} must return {count} values, got {got}", row)
    raise AssertionError("values of which each has the right number must come apart")


def _copy_infos(infos: Sequence[Any], refuse: Refuse) -> list[Info]:
    """Copy infos, which environments may use again."""
    for row, info in enumerate(infos):
        if not isinstance(info, Mapping):
            raise refuse(f"column {names.INFOS!r} must hold dicts, got a {type(info).__name__}", row)
    return list(map(dict, infos))


def _check_environments(envs: Sequence[Any]) -> None:
    """Raise EnvironmentSpecError unless these are different Gymnasium environments with equal spaces."""
    if not envs:
        raise EnvironmentSpecError("there must be at least one environment, got none")
    single = require("gymnasium", "envs").Env
    for index, env in enumerate(envs):
        if not isinstance(env, single):
            raise EnvironmentSpecError(
                f"environment {index} must be a single Gymnasium environment, got a {type(env).__name__}"
            )
        check_space(names.OBS, index, env.observation_space, envs[0].observation_space)
        check_space(names.ACTIONS, index, env.action_space, envs[0].action_space)
    check_different(envs)


def check_different(envs: Sequence[Any]) -> None:
    """Refuse environments of which one stands in the list twice; functions and ids that make them may.

    Raises
    ------
    EnvironmentSpecError
        If one does.
    """
    known: set[int] = set()
    for index, env in enumerate(envs):
        if not hasattr(env, "step") or isinstance(env, type):
            continue
        own = id(getattr(env, "unwrapped", env))
        if own in known:
            raise EnvironmentSpecError(
                f"environments must be different objects, and environment {index} is one of those before it"
            )
        known.add(own)


def check_space(top: str, index: int, space: Any, first: Any) -> None:
    """Refuse a space that is not that of environment 0.

    Raises
    ------
    EnvironmentSpecError
        If they differ; names the part that does.
    """
    if space == first:
        return
    layout, wanted = SpaceLayout(space), SpaceLayout(first)
    name, must, got = top, first, space
    if layout.names == wanted.names:
        parts = zip(column_names(top, layout), wanted.spaces, layout.spaces, strict=True)
        name, must, got = next((part for part in parts if part[1] != part[2]), (top, first, space))
    raise EnvironmentSpecError(
        f"column {name!r} must come from the space {must}, as in environment 0, got {got} from environment {index}"
    )

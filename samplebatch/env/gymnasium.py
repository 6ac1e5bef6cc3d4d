"""Adapters of lists of Gymnasium environments, and of vector environments of Gymnasium, EnvPool and Tianshou.

Gymnasium's vector environments have three autoreset modes. The adapters convert the step results of all modes to one
format: each row is a transition or an autoreset step, with the outcome and the observation for the next action.

============  ====================================================  ====================================================
autoreset     in Gymnasium                                          in the step result
============  ====================================================  ====================================================
next step     the next step resets; its action is ignored and its   the row is an autoreset step, not a transition
              reward is 0
same step     the reset is immediate; the final observation and     final observation and info are moved to the last
              info are in the infos of the reset                    step of the episode
disabled      the environment is not reset                          the adapter resets the environment immediately
============  ====================================================  ====================================================
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Any, ClassVar

import numpy as np

from samplebatch import names
from samplebatch.column.casting import BOOL, FLOAT, Refuse, exact_outcomes, exact_rows, nearest_rows
from samplebatch.env import stacking
from samplebatch.env.base import Environments, Flags, Floats, StepResult, refuse_mask
from samplebatch.env.infos import Infos, Rows, copy_infos, drop_finals, replace_infos, restore_finals, says_more
from samplebatch.env.seeds import seeds_of_reset
from samplebatch.env.spaces import Leaf, SpaceLayout, column_names, put
from samplebatch.errors import EnvironmentSpecError, require

Info = dict[str, Any]
StepParts = tuple[list[Leaf], Floats, Flags, Flags, list[Info], Flags | None]
"""New observations by leaf, rewards, flags, infos (empty if all infos are empty), and autoreset steps."""


class EnvironmentList(Environments):
    """Adapter of a list of single Gymnasium environments, stepped sequentially in this process.

    An environment is reset immediately after its episode or, if `resets_later` is true, by the next step. The values of
    a step are converted losslessly and copied, because environments may overwrite their arrays and infos.

    - `envs`: environments with equal spaces.

    >>> import gymnasium, numpy as np
    >>> environments = EnvironmentList([gymnasium.make("CartPole-v1") for _ in range(3)])
    >>> obs, _ = environments.reset(seeds=[1, 2, 3])
    >>> new_obs, rewards, *_ = environments.step_raw([np.array([0, 1, 0])])
    >>> new_obs[0].shape, rewards
    ((3, 4), array([1., 1., 1.]))
    >>> environments.close()
    """

    _reward_shape: tuple[int, ...] = ()
    """Shape of a reward: (agents,) where agents take turns."""

    def __init__(self, envs: Iterable[Any]) -> None:
        self._envs = list(envs)
        _check_environments(self._envs)
        first = self._envs[0]
        super().__init__(self._envs, len(self._envs), first.observation_space, first.action_space)
        self._resetting = False

    def refuse(self, sentence: str, env: int | None) -> EnvironmentSpecError:
        if not (self._resetting and self.made):
            return super().refuse(sentence, env)
        return EnvironmentSpecError(f"{sentence} from environment {env} in the reset after step {self.made}")

    def reset(self, *, seeds: Sequence[int] | None = None, **arguments: Any) -> tuple[Sequence[Leaf], Infos]:
        numbers = seeds_of_reset(self.num_envs, seeds, arguments.pop("seed", None))
        self.made = 0
        seeded = [arguments if number is None else {"seed": number, **arguments} for number in numbers]
        return self._reset(range(self.num_envs), seeded)

    def _reset(self, envs: Sequence[int], arguments: Iterable[dict[str, Any]]) -> tuple[list[Leaf], list[Info]]:
        self._resetting = True
        returned = self._reset_each(envs, arguments)
        refuse = self.refusing(*envs)
        obs, infos = take_apart("reset", returned, 2, refuse)
        infos_of_reset = _copy_infos(infos, refuse) if any(infos) else []
        result = self.observations.flatten_each(obs, names.OBS, refuse), infos_of_reset
        self._resetting = False
        return result

    def _reset_each(self, envs: Sequence[int], arguments: Iterable[dict[str, Any]]) -> list[Any]:
        return [self._envs[env].reset(**env_arguments) for env, env_arguments in zip(envs, arguments, strict=False)]

    def _step_each(self, actions: Iterable[Any]) -> list[Any]:
        return [env.step(action) for env, action in zip(self._envs, actions, strict=True)]

    def step_raw(self, actions: Sequence[Leaf]) -> StepParts:
        rows = actions[0] if self.actions.plain else self.actions.nest_each(actions, self.num_envs)
        resets = self._resets
        if resets is None:
            returned = self._step_each(rows)
        else:
            requests = zip(resets.tolist(), self._envs, rows, strict=True)
            returned = [
                self._begin(env) if is_due else environment.step(action)
                for env, (is_due, environment, action) in enumerate(requests)
            ]
        self.made += 1
        refuse = self.refuse
        obs, rewards, terminateds, truncateds, infos = take_apart("step", returned, 5, refuse)
        leaves = self.observations.flatten_each(obs, names.OBS, refuse)
        outcomes = exact_outcomes(rewards, terminateds, truncateds, refuse, self._reward_shape)
        info_copies = _copy_infos(infos, refuse) if any(infos) else []
        if self.resets_later:
            self._note_ends(*outcomes[1:])
        return leaves, *outcomes, info_copies, resets

    def _begin(self, env: int) -> tuple[Any, ...]:
        """Reset an environment in an autoreset step and return the step, whose reward is 0."""
        self._resetting = True
        (obs,), (info,) = take_apart("reset", [self._envs[env].reset()], 2, self.refusing(env))
        self._resetting = False
        return obs, 0.0, False, False, info

    def next_obs(self, step: StepParts) -> tuple[Sequence[Leaf], Infos]:
        """Reset environments whose episodes ended; return the observations and infos for the next action."""
        new_obs, _, terminateds, truncateds, infos_of_step, _ = step
        if self.resets_later:
            return new_obs, infos_of_step
        done = terminateds | truncateds
        # `in` on bytes finds a set flag faster than NumPy counts flags.
        if 1 not in done.tobytes():
            return new_obs, infos_of_step
        ended = done.nonzero()[0]
        first_obs, first_infos = self._reset(ended.tolist(), repeat({}))
        obs = [put(leaf.copy(), ended, first) for leaf, first in zip(new_obs, first_obs, strict=True)]
        if not (infos_of_step or first_infos):
            return obs, infos_of_step
        infos = list(infos_of_step) or [{} for _ in range(self.num_envs)]
        for env, info in zip(ended.tolist(), first_infos or repeat({}), strict=False):
            infos[env] = info
        return obs, infos

    def _parts(self) -> list[Any]:
        return self._envs

    def render_all(self) -> None:
        for env in self._envs:
            env.render()

    def close(self) -> None:
        with ExitStack() as stack:
            for env in reversed(self._envs):
                stack.callback(env.close)


def take_apart(method: str, returned: Sequence[Any], count: int, refuse: Refuse) -> Sequence[tuple[Any, ...]]:
    """Transpose the results of all environments into `count` tuples of one item per environment."""
    try:
        parts = tuple(zip(*returned, strict=True))
    except (TypeError, ValueError):
        parts = ()
    if len(parts) == count:
        return parts
    for row, result in enumerate(returned):
        if not isinstance(result, tuple | list) or len(result) != count:
            actual = len(result) if isinstance(result, tuple | list) else f"a single {type(result).__name__}"
            raise refuse(f"{method} must return {count} values, got {actual}", row)
    raise AssertionError("results of the right length must be transposable")


def _copy_infos(infos: Sequence[Any], refuse: Refuse) -> list[Info]:
    for row, info in enumerate(infos):
        if not isinstance(info, Mapping):
            raise refuse(f"column {names.INFOS!r} must contain dicts, got a {type(info).__name__}", row)
    return list(map(dict, infos))


def _check_environments(envs: Sequence[Any]) -> None:
    if not envs:
        raise EnvironmentSpecError("env must contain at least one environment, got none")
    single = require("gymnasium", "envs").Env
    for index, env in enumerate(envs):
        if not isinstance(env, single):
            raise EnvironmentSpecError(
                f"environment {index} must be a single Gymnasium environment, got a {type(env).__name__}"
            )
    check_equal_spaces([env.observation_space for env in envs], [env.action_space for env in envs])
    check_different(envs)


def check_equal_spaces(observation_spaces: Sequence[Any], action_spaces: Sequence[Any]) -> None:
    """Raise EnvironmentSpecError if an environment's spaces differ from the spaces of environment 0."""
    for index, (observations, actions) in enumerate(zip(observation_spaces, action_spaces, strict=True)):
        check_space(names.OBS, index, observations, observation_spaces[0])
        check_space(names.ACTIONS, index, actions, action_spaces[0])


def check_different(envs: Sequence[Any]) -> None:
    """Reject a list that contains the same environment object twice; functions and ids may be repeated."""
    identities: set[int] = set()
    for index, env in enumerate(envs):
        if not hasattr(env, "step") or isinstance(env, type):
            continue
        identity = id(getattr(env, "unwrapped", env))
        if identity in identities:
            raise EnvironmentSpecError(f"environments must be different objects, got environment {index} twice")
        identities.add(identity)


def check_space(top: str, index: int, space: Any, first: Any) -> None:
    """Reject a space that differs from the space of environment 0."""
    if space == first:
        return
    layout, expected = SpaceLayout(space), SpaceLayout(first)
    name, required, actual = top, first, space
    if layout.names == expected.names:
        parts = zip(column_names(top, layout), expected.spaces, layout.spaces, strict=True)
        name, required, actual = next((part for part in parts if part[1] != part[2]), (top, first, space))
    raise EnvironmentSpecError(
        f"column {name!r} must have the space of environment 0, {required}, got {actual} from environment {index}"
    )


_count = np.count_nonzero

_FINAL_OBSERVATIONS = ("final_obs", "final_observation")
"""Names of final observations in infos, in Gymnasium 1.0 and earlier."""


class VectorEnvironments(Environments):
    """Base class of adapters for Gymnasium vector environments."""

    _saved_names: ClassVar[Sequence[str]] = ("made", "_raw", "_device")

    def __init__(self, env: Any) -> None:
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)
        inner = getattr(env, "unwrapped", env)
        self._copies = getattr(inner, "copy", False) is not True
        self._seeds_each = hasattr(inner, "env_fns")
        if _is_async(inner) and inner.shared_memory:
            check_shared(self.observations)
        self._flat = self.observations.plain and self.actions.plain
        self._obs_names = column_names(names.OBS, self.observations)
        self._obs_dtype = env.single_observation_space.dtype
        shape = (self.num_envs,)
        # Dtypes and shapes of a step that requires no conversion.
        self._plain_forms = (
            self._obs_dtype, self._shape_of(env.single_observation_space), FLOAT, shape, BOOL, shape, BOOL, shape,
        )  # fmt: skip
        self._device: Any = None
        # Whether observations can be passed on unchanged; determined by a reset.
        self._raw = False

    def reset(self, *, seeds: Sequence[int] | None = None, **arguments: Any) -> tuple[Sequence[Leaf], Infos]:
        refuse_mask(arguments)
        if seeds is not None:
            arguments.setdefault("seed", list(seeds) if self._seeds_each else seeds[0])
        obs, infos = self.env.reset(**arguments)
        self.made = 0
        self._raw = self._flat and not self._copies and getattr(obs, "dtype", None) == self._obs_dtype
        leaves = self._split(obs)
        self._device = leaves[0].device if stacking.is_tensor(leaves[0]) else None
        return leaves, infos if self._device is None else stacking.infos_to_host(infos)

    def _shape_of(self, space: Any) -> tuple[int, ...]:
        return (self.num_envs, *(space.shape or ()))

    def _split(self, obs: Any) -> Sequence[Leaf]:
        """Split observations into leaves, convert them losslessly, and copy leaves that the environment reuses."""
        layout = self.observations
        try:
            leaves = layout.flatten(obs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            actual = ", ".join(map(repr, obs)) if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
            requirement = (
                f"observations must have the parts {', '.join(map(repr, layout.names))} of their space, got {actual}"
            )
            raise self.refuse(requirement, None) from error
        for index, (leaf, space, name) in enumerate(zip(leaves, layout.spaces, self._obs_names, strict=True)):
            exact = leaf
            if stacking.is_tensor(leaf):
                stacking.check_tensor(name, leaf, space.dtype, self._shape_of(space), self.refuse)
                leaves[index] = stacking.own_tensor(leaf) if self._copies else leaf
                continue
            if layout.is_numeric(space):
                exact = exact_rows(name, leaf, space.dtype, self._shape_of(space), self.refuse)
            elif len(leaf) != self.num_envs:
                raise self.refuse(f"column {name!r} must have {self.num_envs} rows, got {len(leaf)}", None)
            leaves[index] = exact.copy() if exact is leaf and self._copies else exact
        return leaves

    def _step_exactly(self, actions: Sequence[Leaf]) -> tuple[Any, ...]:
        """Step every environment; convert the results to column dtypes, and copy arrays that the environment reuses."""
        if self._device is not None:
            spaces = zip(actions, self.actions.spaces, strict=True)
            actions = [stacking.actions_to_device(leaf, space, self._device) for leaf, space in spaces]
        step = self.env.step(actions[0] if self._flat else self.actions.nest(actions))
        self.made += 1
        obs, rewards, terminateds, truncateds, infos = self._convert(*step)
        if self._copies:
            return obs, rewards.copy(), terminateds.copy(), truncateds.copy(), copy_infos(infos)
        return obs, rewards, terminateds, truncateds, infos

    def _convert(self, obs: Any, rewards: Any, terminateds: Any, truncateds: Any, infos: Any) -> tuple[Any, ...]:
        shape, refuse = (self.num_envs,), self.refuse
        if self._device is not None:
            rewards, terminateds, truncateds = (
                stacking.to_host(rewards),
                stacking.to_host(terminateds),
                stacking.to_host(truncateds),
            )
            infos = stacking.infos_to_host(infos)
        return (
            self._split(obs),
            exact_rows(names.REWARDS, rewards, FLOAT, shape, refuse),
            exact_rows(names.TERMINATEDS, terminateds, BOOL, shape, refuse),
            exact_rows(names.TRUNCATEDS, truncateds, BOOL, shape, refuse),
            infos,
        )

    def step_raw(self, actions: Sequence[Leaf]) -> Any:
        resets = self._resets
        if self._raw:
            obs, rewards, terminateds, truncateds, infos = step = self.env.step(actions[0])
            self.made += 1
            try:
                is_plain = (
                    obs.dtype, obs.shape, rewards.dtype, rewards.shape,
                    terminateds.dtype, terminateds.shape, truncateds.dtype, truncateds.shape,
                ) == self._plain_forms  # fmt: skip
            except AttributeError:
                # One value is not an array.
                is_plain = False
            if is_plain:
                obs = (obs,)
            else:
                obs, rewards, terminateds, truncateds, infos = self._convert(*step)
        else:
            obs, rewards, terminateds, truncateds, infos = self._step_exactly(actions)
        if self.resets_later:
            self._note_ends(terminateds, truncateds)
        return obs, rewards, terminateds, truncateds, infos, resets


class NextStepEnvironments(VectorEnvironments):
    """Adapter of a vector environment with next-step autoreset."""

    resets_later = True
    _saved_names = ("made", "_raw", "_device", "_resets")

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        inner = getattr(env, "unwrapped", env)
        # Processes without shared memory do not notice that a reset of all environments replaces the autoreset that
        # they still owe: in the next step they would reset their environment once more.
        self._resets_again = _is_async(inner) and not inner.shared_memory

    def reset(self, *, seeds: Sequence[int] | None = None, **arguments: Any) -> tuple[Sequence[Leaf], Infos]:
        if not self._resets_again:
            self._resets = None
        return super().reset(seeds=seeds, **arguments)

    def finish_chunk(self, steps: Sequence[Any]) -> StepResult:
        result = super().finish_chunk(steps)
        for step_infos in result.infos.values():
            _refuse_finals(step_infos)
        return result


def _refuse_finals(infos: Any) -> None:
    for name in _FINAL_OBSERVATIONS:
        if infos and isinstance(infos, dict) and name in infos:
            raise EnvironmentSpecError(
                f"a vector environment with next-step autoreset must return no infos[{name!r}]; "
                "with same-step autoreset, its metadata['autoreset_mode'] must be AutoresetMode.SAME_STEP"
            )


class SameStepEnvironments(VectorEnvironments):
    """Adapter of a vector environment with same-step autoreset."""

    def next_obs(self, step: Any) -> tuple[Sequence[Leaf], Infos]:
        """Return the observations for the next action, and the infos without final observations and final infos."""
        infos = step[4]
        return step[0], drop_finals(infos) if infos else infos

    def finish_chunk(self, steps: Sequence[Any]) -> StepResult:
        result = super().finish_chunk(steps)
        rows = (result.terminateds | result.truncateds).nonzero()[0]
        if not len(rows):
            return result
        infos = result.infos
        steps_of_finals, envs = np.divmod(rows, self.num_envs)
        finals = [
            _finals(infos.get(step))[env] for step, env in zip(steps_of_finals.tolist(), envs.tolist(), strict=True)
        ]
        for step in dict.fromkeys(steps_of_finals.tolist()):
            if says_more(infos[step]):
                infos[step] = restore_finals(infos[step], envs[steps_of_finals == step], self.num_envs)
            else:
                del infos[step]
        leaves = result.new_obs
        if len(steps) == 1:
            # The policy acts next on the observations of the resets.
            leaves = [stacking.join_blocks(name, [leaf]) for name, leaf in zip(self._new_names, leaves, strict=True)]
        return result._replace(new_obs=self._put_last(leaves, rows, finals, self.refusing(*envs.tolist())))

    def _put_last(self, leaves: Sequence[Leaf], rows: Rows, finals: Sequence[Any], refuse: Refuse) -> Sequence[Leaf]:
        """Write final observations of single environments into rows of the leaves; widen dtypes if necessary."""
        parts: list[Any] = [list(finals)]
        if not self._flat:
            parts = self.observations.flatten_each(finals, names.NEXT_OBS, refuse)
        written = []
        for name, leaf, part, space in zip(self._new_names, leaves, parts, self.observations.spaces, strict=True):
            dtype = space.dtype if stacking.is_tensor(leaf) else leaf.dtype
            if not dtype.hasobject:
                part = nearest_rows(name, part, dtype, (len(rows), *space.shape), refuse)
            written.append(put(leaf, rows, part))
        return written


def _finals(infos: Any) -> Any:
    finals = infos.get("final_obs") if isinstance(infos, dict) else None
    if finals is None:
        raise EnvironmentSpecError(
            "a vector environment with same-step autoreset must return final observations in "
            "infos['final_obs'], got none"
        )
    return finals


class DisabledEnvironments(VectorEnvironments):
    """Adapter of a vector environment without autoreset: the adapter resets environments after their episodes."""

    def step_raw(self, actions: Sequence[Leaf]) -> Any:
        obs, rewards, terminateds, truncateds, infos = self._step_exactly(actions)
        done = terminateds | truncateds
        if not _count(done):
            return obs, rewards, terminateds, truncateds, infos, None, obs, infos
        reset_obs, reset_infos = self.env.reset(options={"reset_mask": done})
        reset_infos = replace_infos(infos, reset_infos, done.nonzero()[0], self.num_envs)
        return obs, rewards, terminateds, truncateds, infos, None, self._split(reset_obs), reset_infos

    def next_obs(self, step: Any) -> tuple[Sequence[Leaf], Infos]:
        return step[6], step[7]


def check_shared(observations: SpaceLayout) -> None:
    """Reject shared memory with non-numeric observations, which Gymnasium does not update after the first read."""
    for name, space in zip(observations.names, observations.spaces, strict=True):
        if not observations.is_numeric(space):
            raise EnvironmentSpecError(
                f"observations in shared memory must be numeric, got {f'{name!r}, ' if name else ''}a "
                f"{type(space).__name__}, which Gymnasium reads only once; create the AsyncVectorEnv with "
                "shared_memory=False"
            )


_BY_MODE: dict[str, type[VectorEnvironments]] = {
    "NextStep": NextStepEnvironments,
    "SameStep": SameStepEnvironments,
    "Disabled": DisabledEnvironments,
}


def _is_async(env: Any) -> bool:
    return isinstance(env, require("gymnasium.vector", "envs").AsyncVectorEnv)


def vector_environments(env: Any) -> Environments:
    """Create the adapter for the autoreset mode of a Gymnasium vector environment."""
    mode = _mode(env)
    if is_plain_sync(env):
        return NextStepSyncEnvironments(env) if mode == "NextStep" else SyncEnvironments(env)
    return _BY_MODE[mode](env)


def _mode(env: Any) -> str:
    # Metadata may be shared by all vector environments of a class, regardless of their modes.
    metadata = getattr(env, "metadata", None) or {}
    mode = getattr(getattr(env, "unwrapped", env), "autoreset_mode", None) or metadata.get("autoreset_mode")
    if mode is None:
        warnings.warn(
            f"{type(env).__name__} must specify its autoreset mode in metadata['autoreset_mode'], one of "
            "gymnasium.vector.AutoresetMode; NEXT_STEP is assumed",
            stacklevel=5,
        )
    word = str(getattr(mode, "value", mode or "NextStep"))
    if word not in _BY_MODE:
        raise EnvironmentSpecError(f"autoreset must be one of {', '.join(_BY_MODE)}, got {word}")
    return word


def is_plain_sync(env: Any) -> bool:
    """Return whether an environment is a `SyncVectorEnv` without custom behaviour.

    The result is False for wrapped and derived environments, environments with custom spaces, and environments whose
    `step` or `reset` has been replaced.
    """
    plain = type(env) is require("gymnasium.vector", "envs").SyncVectorEnv
    return plain and not vars(env).keys() & {"step", "reset"} and getattr(env, "observation_mode", "same") == "same"


class SyncEnvironments(EnvironmentList):
    """Environments of an unmodified `SyncVectorEnv`, stepped individually and reset at the end of their episodes.

    The adapter is used for vector environments with autoreset mode same-step or disabled. The vector environment itself
    is not stepped and must be reset before it is used directly again.

    - `env`: the vector environment.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env.envs)
        self.env = env

    def reset(self, *, seeds: Sequence[int] | None = None, **arguments: Any) -> tuple[Sequence[Leaf], Infos]:
        refuse_mask(arguments)
        return super().reset(seeds=seeds, **arguments)

    def render_all(self) -> None:
        self.env.render()

    def close(self) -> None:
        self.env.close()


class NextStepSyncEnvironments(SyncEnvironments):
    """Environments of an unmodified `SyncVectorEnv` with next-step autoreset, stepped individually."""

    resets_later = True
    _saved_names = ("made", "_resets")

    def reset(self, *, seeds: Sequence[int] | None = None, **arguments: Any) -> tuple[Sequence[Leaf], Infos]:
        self._resets = None
        return super().reset(seeds=seeds, **arguments)


_BOOKKEEPING = frozenset({"env_id", "elapsed_step"})
"""Infos that duplicate the columns `env_id` and `t`."""


def is_envpool(env: Any) -> bool:
    """Return whether a vector environment is an EnvPool, possibly wrapped; EnvPool is not imported."""
    inner = getattr(env, "unwrapped", env)
    return hasattr(inner, "all_env_ids") and hasattr(inner, "is_async")


class EnvPoolEnvironments(NextStepEnvironments):
    """Adapter of an EnvPool; each environment is reset in the step after the end of its episode.

    EnvPool seeds its environments on creation (`envpool.make(..., seed=1)`), so the seed of a collector has no effect.

    - `env`: an EnvPool created with `env_type="gymnasium"`, possibly wrapped in Gymnasium's vector wrappers.
    """

    def __init__(self, env: Any) -> None:
        inner = getattr(env, "unwrapped", env)
        if inner.is_async:
            raise EnvironmentSpecError(
                f"an EnvPool must step all environments together, with batch_size={len(inner)}, got "
                f"{inner.config['batch_size']}"
            )
        super().__init__(env)

    def reset(self, *, seeds: Sequence[int] | None = None, **arguments: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; EnvPool does not accept seeds on reset."""
        obs, infos = super().reset(**arguments)
        return obs, _leave_out_bookkeeping(infos)

    def _convert(self, obs: Any, rewards: Any, terminateds: Any, truncateds: Any, infos: Any) -> tuple[Any, ...]:
        return super()._convert(obs, rewards, terminateds, truncateds, _leave_out_bookkeeping(infos))


def _leave_out_bookkeeping(infos: Any) -> dict[str, Any]:
    """Remove environment ids and step counts from EnvPool's infos; remove player ids of single-player environments."""
    remaining = {key: value for key, value in infos.items() if key not in _BOOKKEEPING}
    if remaining.get("players", {}).keys() == {"env_id"}:
        del remaining["players"]
    return remaining


def is_tianshou_vector(env: Any) -> bool:
    """Return whether an object is a Tianshou vector environment, possibly wrapped; Tianshou is not imported."""
    module = sys.modules.get("tianshou.env.venvs")
    return module is not None and isinstance(env, module.BaseVectorEnv)


def open_vector(env: Any) -> Any:
    """Return the vector environment inside Tianshou's wrappers.

    Raises EnvironmentSpecError if the vector environment has been closed.
    """
    inner = _unwrap(env)
    if inner.is_closed:
        raise EnvironmentSpecError(f"the environments must be open, got a closed {type(inner).__name__}")
    return inner


def _unwrap(env: Any) -> Any:
    while "venv" in vars(env):
        env = env.venv
    return env


def functions_of(env: Any) -> list[Callable[[], Any]]:
    """Return the functions that create the environments of a Tianshou vector environment."""
    return list(open_vector(env)._env_fns)


def waiting_of(env: Any) -> tuple[int | None, float | None]:
    """Return `wait_num` and `timeout` of a Tianshou vector environment; None for both if it is synchronous."""
    inner = open_vector(env)
    return (inner.wait_num, inner.timeout) if inner.is_async else (None, None)


class TianshouEnvironments(EnvironmentList):
    """Adapter of Tianshou's `DummyVectorEnv`, `SubprocVectorEnv`, `ShmemVectorEnv` or `RayVectorEnv`.

    Each step is one call of the vector environment, including wrappers such as `VectorEnvNormObs`. Environments whose
    episodes ended in the same step are reset in one call. With Tianshou's `PettingZooEnv`, a step is one agent's turn,
    `obs.agent_id` is the acting agent, and a reward has one number per agent.

    - `env`: the vector environment.

    Raises EnvironmentSpecError if the vector environment is closed or asynchronous, or its environments have different
    spaces.
    """

    keeps_seeds = True

    def __init__(self, env: Any) -> None:
        inner = open_vector(env)
        if inner.is_async:
            raise EnvironmentSpecError(
                f"a {type(inner).__name__} must step all {len(inner)} environments together, got "
                f"wait_num={inner.wait_num} and timeout={inner.timeout}; use an AsyncCollector"
            )
        observation_spaces, action_spaces = env.observation_space, env.action_space
        check_equal_spaces(observation_spaces, action_spaces)
        observation_space = observation_spaces[0]
        if agents := _agents_in_turn(env):
            observation_space = _space_of_turns(observation_space, action_spaces[0])
            self._reward_shape = (agents,)
        super(EnvironmentList, self).__init__(env, len(inner), observation_space, action_spaces[0])
        self._resetting = False

    def _reset_each(self, envs: Sequence[int], arguments: Iterable[dict[str, Any]]) -> list[Any]:
        env_arguments = [arguments_of_env for _, arguments_of_env in zip(envs, arguments, strict=False)]
        if all(arguments_of_env is env_arguments[0] for arguments_of_env in env_arguments):
            return list(zip(*self.env.reset(list(envs), **env_arguments[0]), strict=True))
        # One call passes the same arguments to all environments, but seeds differ.
        returned = [
            self.env.reset([env], **arguments_of_env) for env, arguments_of_env in zip(envs, env_arguments, strict=True)
        ]
        return [(obs[0], infos[0]) for obs, infos in returned]

    def _step_each(self, actions: Iterable[Any]) -> list[Any]:
        returned = list(zip(*self.env.step(actions), strict=True))
        for *_, info in returned:
            # Tianshou adds the environment's number to infos; here it is the column `env_id`.
            info.pop("env_id", None)
        return returned

    def _parts(self) -> list[Any]:
        return [self.env]

    def render_all(self) -> None:
        self.env.render()

    def close(self) -> None:
        if not _unwrap(self.env).is_closed:
            self.env.close()


def _agents_in_turn(env: Any) -> int:
    """Return the number of agents in Tianshou's turn-based `PettingZooEnv`; 0 for other environments."""
    try:
        return len(env.get_env_attr("agent_idx", [0])[0] or ())
    except AttributeError:
        return 0


def _space_of_turns(space: Any, action_space: Any) -> Any:
    spaces = require("gymnasium.spaces", "envs")
    parts = {"agent_id": spaces.Text(100), "obs": space}
    allowed = None
    if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:
        parts["obs"], allowed = space["observation"], space["action_mask"].shape
    elif isinstance(action_space, spaces.Discrete):
        allowed = (int(action_space.n),)
    if allowed is not None:
        parts["mask"] = spaces.Box(0, 1, allowed, bool)
    return spaces.Dict(parts)

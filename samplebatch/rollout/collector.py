"""Collector of steps in Gymnasium environments, and base class of all collectors."""

from __future__ import annotations

import copy
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import suggest_names, whole
from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.batch.flags import MissingAttribute
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.unpickling import require_permission
from samplebatch.env.as_environments import as_environments
from samplebatch.env.infos import Infos, Rows, batch_of
from samplebatch.env.registry import EnvLike, environment_kind, imports_module
from samplebatch.env.seeds import ENVIRONMENT, POLICY, RANDOM, as_seeds, seed_number, seeds_at
from samplebatch.env.spaces import Columns, Leaf
from samplebatch.errors import ArgumentError, ColumnTypeError, EnvironmentSpecError, FormatError
from samplebatch.names import PolicyID
from samplebatch.policy import state as policy_state
from samplebatch.policy.action_map import ActionMap, random_action_map, space_to_draw
from samplebatch.policy.actor import Actor, ActResult
from samplebatch.policy.agents import check_options
from samplebatch.policy.as_policy import CollectorPolicy, evaluation_mode, is_random, is_space
from samplebatch.policy.peers import is_module, policy_of
from samplebatch.policy.random import RandomByEnvironment
from samplebatch.policy.state import detach
from samplebatch.rollout.followed_weights import FollowedWeights, PublishedWeightsSource, WeightsSubscription
from samplebatch.rollout.postprocessing import Hook, check_hooks, postprocess
from samplebatch.rollout.recorder import EpisodeHook, StepHook, VectorRecorder
from samplebatch.rollout.statistics import BatchT, CollectStats

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer


class Uncopied:
    """Base class of objects that own environments and a policy; supports `state_dict`, but not copying or pickling."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ColumnTypeError(
            f"a {type(self).__name__} must not be copied or pickled, as it has environments and a policy; pass its "
            "state_dict() to load_state_dict() of a new one"
        )


_COLLECT = "collect(n_step=...) or collect(n_episode=...) collects steps"
_ELSEWHERE = {
    **dict.fromkeys(("run", "step", "rollout", "collect_rollouts"), _COLLECT),
    "sample": "collector.buffer.sample(batch_size) returns sampled rows and their indices",
}
"""Methods of collectors in other libraries, and what has their place here."""


class BaseCollector(Uncopied, ABC, Generic[BatchT]):
    """Base class of collectors: policies act in environments, and every step is stored in a buffer or a batch.

    Attributes
    ----------
    collect_step, collect_episode, collect_time
        Number of steps, number of completed episodes, and seconds spent in `collect`, since the last `reset_stat`.
    """

    vars().update({name: MissingAttribute(name, way_out) for name, way_out in _ELSEWHERE.items()})
    _saved_names: ClassVar[Sequence[str]] = ("_unroll_id", "collect_step", "collect_episode", "collect_time")
    """Attributes with plain values that `state_dict` includes."""

    def __init__(
        self,
        policy: Any,
        buffer: Any,
        num_envs: int,
        hooks: Sequence[Hook],
        policies: Sequence[PolicyID] | None,
        worker_index: int,
        weights: WeightsSubscription | PublishedWeightsSource | None = None,
    ) -> None:
        self.policy, self.buffer, self.num_envs = policy, buffer, num_envs
        self._remote = as_remote(buffer)
        self._hooks = check_hooks(hooks, policies, buffer=buffer)
        self._evaluation_mode = evaluation_mode(policy)
        # Batch numbers of different workers of a run do not overlap.
        self._unroll_id = worker_index << 32
        self._closed = False
        self.count_steps: Callable[[int], None] | None = None
        self.constants: dict[str, int] = {}
        self._weights = None if weights is None else FollowedWeights(weights)
        self.reset_stat()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the environments."""
        if not self._closed:
            self._closed = True
            if self._weights is not None:
                self._weights.close()
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """Close the environments; called at most once."""

    # Resetting

    def reset(
        self,
        reset_buffer: bool = True,
        reset_stats: bool = True,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Any, Any]:
        """Reset the environments and, by default, the buffer and the counters; return initial observations and infos.

        Parameters
        ----------
        reset_buffer
            Whether to empty the buffer.
        reset_stats
            Whether to set the counters to zero.
        gym_reset_kwargs
            Arguments of the environments' `reset`.
        """
        returned = self.reset_env(gym_reset_kwargs)
        if reset_buffer:
            self.reset_buffer()
        if reset_stats:
            self.reset_stat()
        return returned

    def reset_env(self, gym_reset_kwargs: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode in every environment, and return the initial observations and infos.

        Unfinished episodes are abandoned: in a buffer, their last steps are marked as truncated.

        Parameters
        ----------
        gym_reset_kwargs
            Arguments of the environments' `reset`, such as `seed` or `options`. The automatic reset after an episode
            does not use `gym_reset_kwargs`.

        Raises
        ------
        EnvironmentSpecError
            If the collector has been closed.
        """
        if self._closed:
            raise EnvironmentSpecError("the collector must be open to reset its environments; it has been closed")
        return self._reset_env(**(gym_reset_kwargs or {}))

    @abstractmethod
    def _reset_env(self, **arguments: Any) -> tuple[Any, Any]:
        """Start an episode in every environment."""

    def reset_buffer(self, keep_statistics: bool = False) -> None:
        """Empty the buffer, if any."""
        if self.buffer is not None:
            self.buffer.reset(keep_statistics=keep_statistics)

    def reset_stat(self) -> None:
        """Set the counters of steps, episodes and time to zero."""
        self.collect_step = self.collect_episode = 0
        self.collect_time = 0.0

    # Collecting

    @suggest_names(n_steps="n_step", num_steps="n_step", steps="n_step", n_episodes="n_episode", episodes="n_episode")
    def collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        reset_before_collect: bool = False,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> CollectStats[BatchT]:
        """Collect steps or episodes into the buffer or, without a buffer, into `batch` of the returned statistics.

        Parameters
        ----------
        n_step, n_episode
            Total number of steps, or of episodes, in all environments; pass exactly one of the two arguments. The class
            description specifies how steps and episodes are distributed over the environments.
        random
            Whether to draw random actions instead of calling the policy.
        render
            Time in seconds to wait after rendering each step; None disables rendering.
        reset_before_collect
            Whether to start new episodes first, without emptying the buffer.
        gym_reset_kwargs
            Arguments of the environments' `reset`, used if `reset_before_collect` is true or the environments have not
            been reset yet.

        Raises
        ------
        ArgumentError
            If not exactly one of `n_step` and `n_episode` is positive.
        EnvironmentSpecError
            If an environment violates its interface, or the collector has been closed.
        PolicySpecError, PolicyNotFoundError
            If a policy returns invalid actions, or an agent has no policy.
        ColumnMismatchError
            If the steps of a policy have different columns, row shapes, or dtypes without a common dtype; or if the
            unit of the collector's actions differs from the unit of the actions in the buffer (see
            `SampleBatch.action_unit`).
        ServiceError
            If a request to the service of `weights` has failed since the last call to `collect`.
        """
        if not (type(n_step) is int and n_step > 0 and n_episode is None):
            check_amounts(n_step, n_episode)
        began = time.perf_counter()
        if self._weights is not None and not self._closed:
            self._weights.load_newest(self.policy)
            self.constants[names.WEIGHTS_VERSION] = self._weights.version
        if reset_before_collect or self._needs_reset(gym_reset_kwargs):
            self.reset_env(gym_reset_kwargs)
        elif self._closed:
            raise EnvironmentSpecError("the collector must be open to step its environments; it has been closed")
        self._prepare(random=random)
        try:
            with self._evaluation_mode:
                if n_step:
                    self._collect_steps(n_step, random=random, render=render)
                else:
                    self._collect_episodes(n_episode or 0, random=random, render=render)
        except BaseException:
            self._break_off()
            raise
        stats = self._report({names.UNROLL_ID: self._unroll_id, **self.constants}, began)
        self._unroll_id += 1
        self.collect_step += stats.n_collected_steps
        self.collect_episode += stats.n_collected_episodes
        self.collect_time += stats.collect_time
        return stats

    @abstractmethod
    def _needs_reset(self, gym_reset_kwargs: dict[str, Any] | None) -> bool:
        """Return whether all environments must be reset before the next step."""

    @abstractmethod
    def _prepare(self, *, random: bool) -> None:
        """Reject policy actions whose unit differs from the unit of the recorded actions."""

    @abstractmethod
    def _collect_steps(self, n_step: int, *, random: bool, render: float | None) -> None: ...

    @abstractmethod
    def _collect_episodes(self, n_episode: int, *, random: bool, render: float | None) -> None: ...

    @abstractmethod
    def _break_off(self) -> None:
        """Clean up after `collect` has failed."""

    @abstractmethod
    def _report(self, constants: Mapping[str, int], began: float) -> CollectStats[BatchT]:
        """Store the recorded steps with a constant column per entry of `constants`; return statistics of the steps."""

    # Resuming

    def _values(self) -> dict[str, Any]:
        """Return copies of the attributes in `_saved_names`, by name; tensors of recurrent states are detached."""
        values = {name: getattr(self, name) for name in self._saved_names}
        return copy.deepcopy({name: detach(value) if name == _RECURRENT else value for name, value in values.items()})

    @abstractmethod
    def _parts(self) -> Mapping[str, Any]:
        """Return the components of the collector that have a `state_dict`, by name."""

    @abstractmethod
    def _environment_parts(self) -> Sequence[Any]:
        """Return the environment adapters; their `load_state_dict` returns whether environments were restored."""

    @abstractmethod
    def _begin_with_new_seeds(self) -> None:
        """Abandon unfinished episodes, and use new seeds for the next reset."""

    def _settle(self) -> None:
        """Wait for steps in flight."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the collector, for `load_state_dict`.

        The state contains the random generators of actions and environments, the counters, the unfinished episodes with
        their returns and lengths, and the states of recurrent policies. The state excludes the states of the policy,
        the hooks and the buffer. Environments are pickled; environments whose classes are not importable are pickled by
        value. If any environment cannot be pickled, for example because it runs in another process, the state contains
        no environments. If the state contains no environments, the entry `why_reset` contains the reason, and a
        collector that loads the state resets its environments.

        Returns
        -------
        dict
            Picklable values, arrays and tensors by name. The entry `why_reset` is None if the environments are
            included.

        Examples
        --------
        >>> from samplebatch import Collector
        >>> collector, again = (Collector("random", "CartPole-v1", seed=seed) for seed in (1, 2))
        >>> _ = collector.collect(n_step=100)
        >>> again.load_state_dict(collector.state_dict(), allow_pickle=True)
        >>> first, other = (c.collect(n_step=100).batch for c in (collector, again))
        >>> (first["obs"] == other["obs"]).all(), (first["t"] == other["t"]).all()
        (np.True_, np.True_)
        """
        self._settle()
        environments = [adapter.state_dict() for adapter in self._environment_parts()]
        return {
            "collector": type(self).__name__,
            "num_envs": self.num_envs,
            "values": self._values(),
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            "environments": environments,
            "why_reset": next(
                (part_state["saved"]["why"] for part_state in environments if part_state["saved"]["why"]), None
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Restore the state of a collector with the same arguments as this collector, including the seed.

        Parameters
        ----------
        state
            Result of `state_dict`.
        allow_pickle
            Whether to unpickle the environments in the state. Unpickling can execute arbitrary code; set `allow_pickle`
            only for states from a trusted source.

        Raises
        ------
        UntrustedPickleError
            If the state contains environments and `allow_pickle` is false. The collector is unchanged.
        FormatError
            If the state is incomplete. The collector is unchanged.
        ArgumentError
            If the class of the collector or the number of environments differs from the saved state. The collector is
            unchanged.
        EnvironmentSpecError
            If the classes of the environments differ from the classes in the saved state. Unfinished episodes are
            abandoned.
        """
        missing = [name for name in _NAMES if name not in state]
        if missing:
            raise FormatError(f"the state of a collector must have the entry {missing[0]!r}")
        actual, expected = (state["collector"], state["num_envs"]), (type(self).__name__, self.num_envs)
        if actual != expected:
            raise ArgumentError(
                f"state must be of a {expected[0]} with {expected[1]} environments, got a {actual[0]} with {actual[1]}"
            )
        if has_pickles(state):
            require_permission(f"the state of a {type(self).__name__}", allow_pickle=allow_pickle)
        self._settle()
        try:
            pairs = zip(self._environment_parts(), state["environments"], strict=True)
            loaded = [adapter.load_state_dict(part_state) for adapter, part_state in pairs]
        except BaseException:
            self._begin_with_new_seeds()
            raise
        for name, value in copy.deepcopy(state["values"]).items():
            setattr(self, name, value)
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])
        if not all(loaded):
            self._begin_with_new_seeds()


def leave_out_environments(state: Mapping[str, Any], why: str) -> dict[str, Any]:
    """Copy a state of a collector or of workers, except for the environments; loading the copy starts new episodes.

    - `state`: result of a collector's or workers' `state_dict`.
    - `why`: value of `why_reset` in the copy.
    """
    if "workers" in state:
        workers = [
            {
                **part_state,
                "task": {
                    **part_state["task"],
                    "collector": leave_out_environments(part_state["task"]["collector"], why),
                },
            }
            for part_state in state["workers"]
        ]
        return {**state, "workers": workers, "why_reset": why}
    environments = [{**part_state, "saved": {"pickles": None, "why": why}} for part_state in state["environments"]]
    return {**state, "environments": environments, "why_reset": why}


def has_pickles(state: Mapping[str, Any]) -> bool:
    """Return whether a collector's state contains pickled environments."""
    return any(part_state["saved"]["pickles"] is not None for part_state in state["environments"])


_MAX_CHUNK = 288
_MAX_CHUNK_NBYTES = 1 << 25
"""Maximum steps of all environments, and bytes of observations, recorded in one chunk.

The steps are 256 plus an eighth for resets. Twice as many were not faster.
"""


class Collector(BaseCollector[SampleBatch]):
    """Collector of steps: a policy acts in one or more environments, and every step is stored in a buffer or a batch.

    In each step, the policy computes actions for all environments, and row i belongs to environment i. Autoreset steps
    of Gymnasium's vector environments are omitted, and the next observation of an episode's last step is always the
    episode's final observation.

    Without a buffer, `collect` returns a batch of the steps, grouped by environment and in time order. The columns of
    the batch are `obs`, `new_obs`, `actions`, `rewards` (float64), `terminateds`, `truncateds`, `infos`, and

    - `eps_id`: the episode, identified by 63 random bits that differ between processes and runs, regardless of the
      seed;
    - `env_id`: the environment, counted from 0; `agent_index`: 0;
    - `t`: steps since the episode started; `unroll_id`: the number of the `collect` call;
    - `policy`: the `policy` entry of the policy's output; `action_logp`, `action_prob`, `action_dist_inputs` and
      `vf_preds` if the policy returns them; `state_in_0`, ..., the recurrent state before the step.

    A buffer receives the same columns as a batch. As with Tianshou's collector, the buffer also receives the recurrent
    state after the step as `policy.hidden_state`.

    Unfinished episodes continue in the next call to `collect`.

    With `n_step`, `collect` steps all environments until `n_step` steps are stored, and may store up to `num_envs` - 1
    additional steps. With `n_episode`, an environment starts another episode while fewer than `n_episode` episodes have
    been started. Every started episode is stored, regardless of its length. Unfinished episodes of earlier calls of
    `collect` are continued and count towards `n_episode`. Gymnasium's vector environments step all environments
    together, so idle environments are also stepped. Steps of idle environments are discarded, and all environments are
    reset before the next call.

    Parameters
    ----------
    policy
        Anything that `as_policy` accepts: a callable on batches or observations, a torch module, an action space; or
        `"random"`. If the policy has methods `map_action` and `add_exploration_noise`, the collector calls them, as
        Tianshou does.
    env
        A Gymnasium environment; a list of environments, which are stepped sequentially in this process; a function that
        creates an environment, or an id such as `"CartPole-v1"` (see `make_environment`); a list of functions or ids; a
        Gymnasium vector environment in any autoreset mode; or Tianshou's `DummyVectorEnv`, `SubprocVectorEnv`,
        `ShmemVectorEnv` or `RayVectorEnv`.
    buffer
        A `ReplayBuffer` for one environment, or a `VectorReplayBuffer` with one ring per environment; or a
        `ReplayClient`, which receives the steps at the end of each call to `collect`.
    num_envs
        Number of environments to create if `env` is a function or an id; 1 by default.
    env_kwargs
        Keyword arguments for the functions or ids that create environments.
    exploration_noise
        Whether to apply the policy's `add_exploration_noise` to the actions; or a function of actions and batch that
        returns actions with noise. Noise is not available for the policy `"random"`.
    on_episode_done_hook
        Function that receives the steps of a finished episode under Tianshou's names, and may return arrays by column
        name, with one row per step. The arrays are stored with the steps (see `EpisodeHook`).
    on_step_hook
        Function that receives decisions and transitions, and may add columns to the transitions (see `StepHook`).
    hooks
        Hooks to apply to the trajectories of every batch, as in `postprocess`; only without a buffer.
    map_action
        Mapping from policy actions to environment actions: `"clip"` clips actions to the bounds of the space, and
        `"scale"` maps [-1, 1] to the bounds; or a function of actions. By default, the policy's `map_action` is used if
        it exists. The unmapped actions are stored. Random actions are drawn from the space; with `"scale"`, the stored
        random actions are scaled to [-1, 1].
    seed
        Seed of random actions and of the environments' first reset. Collectors with equal seeds and the same
        deterministic policy collect the same data, except for `eps_id`. Without a seed, a vector environment of
        Tianshou uses its own seeds.
    infos
        Whether to store infos; policies always receive them.
    worker_index
        Index of this collector among the workers of a run: `env_id` starts at `worker_index * num_envs`, and
        `unroll_id` at `worker_index * 2**32`.
    weights
        A `ReplayClient` or a `Subscription` whose newest published weights are loaded into the policy before each call
        of `collect`; None leaves the policy unchanged. With `weights`, batches and fragments have the column
        `weights_version`, which is 0 before the first publication. A thread with its own connection polls the client's
        service ten times per second, so that `collect` never waits for a message. If the service is unreachable, the
        next call to `collect` raises a `ServiceError`, and the following call continues with the newest weights that
        have been received.

    Attributes
    ----------
    policy, env, buffer
        The arguments of the same names. An algorithm is replaced by its policy; a list, a function or an id is replaced
        by a list of environments.
    num_envs
        Number of environments.
    collect_step, collect_episode, collect_time
        Number of steps, number of completed episodes, and seconds spent in `collect`, since the last `reset_stat`.

    Raises
    ------
    EnvironmentSpecError
        If `env` is of an unknown type or multi-agent, or if several environments have different spaces.
    PolicySpecError, PolicyNotFoundError
        If the policy has an unsupported type, or one of the `hooks` names a policy other than `default_policy`.
    ArgumentError
        If the buffer has fewer rings than environments, both a buffer and `hooks` are passed, or `num_envs` differs
        from the number of environments in `env`; or if both the buffer and a wrapper of the environment stack
        observations.

    Examples
    --------
    >>> collector = Collector(
    ...     lambda obs: (obs[:, 2] > 0).astype(int), "CartPole-v1", num_envs=4, seed=1
    ... )
    >>> stats = collector.collect(n_episode=6)
    >>> stats.n_collected_episodes, stats.batch["new_obs"].shape == (stats.lens.sum(), 4)
    (6, True)
    >>> collector.close()
    """

    _saved_names = (*BaseCollector._saved_names, "_obs", "_infos", "_state", "_seeds", "_env_seeds")

    __class_getitem__: Any = classmethod(GenericAlias)
    """`Collector[CollectStats](...)`, the form in Tianshou's scripts, creates a collector."""

    @suggest_names(environment="env", envs="env", replay_buffer="buffer", num_envs="env")
    def __init__(
        self,
        policy: CollectorPolicy,
        env: EnvLike,
        buffer: ReplayBuffer | RemoteBuffer | None = None,
        *,
        num_envs: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        exploration_noise: bool | Callable[[Any, Batch], Any] = False,
        on_episode_done_hook: EpisodeHook | None = None,
        on_step_hook: StepHook | None = None,
        hooks: Sequence[Hook] = (),
        map_action: ActionMap | None = None,
        seed: int | np.random.SeedSequence | None = None,
        infos: bool = True,
        worker_index: int = 0,
        weights: WeightsSubscription | PublishedWeightsSource | None = None,
    ) -> None:
        check_order(type(self).__name__, policy, env)
        self._environments = environments = as_environments(env, num_envs, env_kwargs)
        self.env = env if hasattr(env, "step") and not isinstance(env, type) else environments.env
        check_buffer(buffer, environments.num_envs)
        check_stacking(buffer, environments.env)
        super().__init__(
            policy_of(policy), buffer, environments.num_envs, hooks, (names.DEFAULT_POLICY_ID,), worker_index, weights
        )
        seeds = as_seeds(seed)
        env_ids = range(worker_index * self.num_envs, (worker_index + 1) * self.num_envs)
        self._env_ids = np.array(env_ids)
        action_seeds, random_seeds, self._env_seeds = (seeds_at(seeds, key) for key in (POLICY, RANDOM, ENVIRONMENT))
        if is_random(policy):
            check_options("exploration_noise", exploration_noise, policy)
            policy, map_action = space_to_draw(map_action, environments.action_space), random_action_map(map_action)
        if is_space(policy):
            # One seed per environment, so that its data do not depend on the number of environments.
            policy = RandomByEnvironment(policy, env_ids, [seeds_at(random_seeds, env_id) for env_id in env_ids])
        self._seeds: Sequence[int] | None = [seed_number(seeds_at(self._env_seeds, env_id)) for env_id in env_ids]
        if seed is None and environments.keeps_seeds:
            self._seeds = None
        self._actor = Actor(
            policy,
            environments.observations,
            environments.actions,
            environments.action_space,
            exploration_noise=exploration_noise,
            map_action=map_action,
            # Workers of a run draw different random actions.
            seed=seeds_at(action_seeds, worker_index) if worker_index else action_seeds,
            # Tianshou's collector stores the state after each step there; fragments for other processes omit it.
            hidden_state="policy.hidden_state" if buffer is not None and self._remote is None else None,
        )
        self._action_unit: ActionUnit | None = None
        self._recorder = VectorRecorder(
            self._env_ids,
            environments.observations,
            environments.actions,
            buffer if self._remote is None else None,
            on_step=on_step_hook,
            on_episode=on_episode_done_hook,
            infos=infos,
        )
        self._obs: Sequence[Leaf] | None = None
        self._infos: Infos = {}
        self._state: Any = None

    def _close(self) -> None:
        self._environments.close()

    def _reset_env(self, **arguments: Any) -> tuple[Any, Infos]:
        self._recorder.begin()
        self._obs, self._infos = self._environments.reset(seeds=self._seeds, **arguments)
        # Later resets continue the environments' generators, so that no two episodes are equal.
        self._seeds = None
        self._state = None
        return self._environments.observations.nest(self._obs), self._infos

    # Resuming

    def _parts(self) -> Mapping[str, Any]:
        return {"actor": self._actor, "recorder": self._recorder}

    def _environment_parts(self) -> Sequence[Any]:
        return [self._environments]

    def _begin_with_new_seeds(self) -> None:
        seeds = [seeds_at(self._env_seeds, env_id, self._unroll_id) for env_id in self._env_ids.tolist()]
        self._seeds = [seed_number(sequence) for sequence in seeds] if self._unroll_id else self._seeds
        self._obs = self._state = None

    # Collecting

    def _needs_reset(self, gym_reset_kwargs: dict[str, Any] | None) -> bool:
        return self._obs is None

    def _prepare(self, *, random: bool) -> None:
        unit = self._actor.random_unit if random else self._actor.action_unit
        if unit is not self._action_unit:
            self._action_unit = common_unit([self._action_unit, unit]) if self._has_pending_steps else unit
        if self.buffer is not None and self._remote is None:
            self.buffer._merge_action_unit(self._action_unit)

    def _break_off(self) -> None:
        # The states of the environments are unknown.
        self._obs = None

    def _report(self, constants: Mapping[str, int], began: float) -> CollectStats[SampleBatch]:
        steps = self._recorder.recorded
        batch, returns, lens = self._recorder.take(constants)
        if batch is not None:
            batch.action_unit = self._action_unit
            if self._hooks:
                batch = postprocess(batch, self._hooks)
            if self._remote is not None:
                if batch:
                    self._remote._add_fragment(batch)
                batch = None
        return CollectStats.from_counts(
            steps=steps, time_s=time.perf_counter() - began, returns=returns, lens=lens, batch=batch
        )

    @property
    def _has_pending_steps(self) -> bool:
        return self._recorder.recorded > 0

    def _collect_steps(self, n_step: int, *, random: bool, render: float | None) -> None:
        recorder = self._recorder
        while recorder.recorded < n_step:
            self._collect_chunk(n_step - recorder.recorded, None, random=random, render=render)

    def _collect_episodes(self, n_episode: int, *, random: bool, render: float | None) -> None:
        quota = EpisodeQuota(self.num_envs, n_episode)
        while quota.left:
            self._collect_chunk(_MAX_CHUNK * self.num_envs, quota, random=random, render=render)
        if self.num_envs > 1:
            # Environments are in the middle of episodes that do not count.
            self._obs = None

    def _collect_chunk(self, max_steps: int, quota: EpisodeQuota | None, *, random: bool, render: float | None) -> None:
        """Step all environments up to a limit, and record the steps as one chunk.

        The chunk ends after `max_steps` steps, after the quota's last episode, or when the maximum chunk size is
        reached.
        """
        limit, rows = 1, self.num_envs
        # A recurrent state may have to be reset after any step.
        if max_steps > rows and render is None and self._state is None and not self._recorder.looks_at_each_step:
            obs_nbytes = sum([leaf.nbytes for leaf in self._obs or ()])
            limit = min(_MAX_CHUNK, max(1, _MAX_CHUNK_NBYTES // (2 * obs_nbytes + 1)))
        columns: list[Columns] = []
        steps: list[Any] = []
        result: ActResult | None = None
        environments, actor = self._environments, self._actor
        takes_infos = actor.takes_batch
        try:
            for _ in range(limit):
                if random:
                    result = actor.draw(self._obs or (), rows)
                else:
                    infos = self._batch_of_infos() if takes_infos else None
                    result = actor.act(self._obs or (), infos, self._state, rows)
                new_steps = rows - environments.to_reset
                step = environments.step_raw(result.actions)
                columns.append(result.columns)
                steps.append(step)
                self._obs, self._infos = environments.next_obs(step)
                if self.count_steps is not None:
                    self.count_steps(new_steps)
                max_steps -= new_steps
                if max_steps <= 0 or result.state is not None:
                    break
                if quota is not None and quota.is_spent_by(step[2], step[3]):
                    break
        finally:
            # Completed steps are recorded even if the policy or an environment has failed.
            if steps:
                self._finish_chunk(columns, steps, quota, result)
        if render is not None:
            self._environments.render_all()
            if render > 0:
                time.sleep(render)

    def _finish_chunk(
        self, columns: list[Columns], steps: list[Any], quota: EpisodeQuota | None, act: ActResult | None
    ) -> None:
        chunk = self._environments.finish_chunk(steps)
        state, drop = None if act is None else act.state, chunk.autoreset
        if quota is None and state is None:
            self._recorder.record_chunk(columns, chunk, drop, act)
            self._state = None
            return
        ends = chunk.ends()
        beyond = None if quota is None else quota.spend(ends)
        if beyond is not None:
            drop = beyond if drop is None else np.union1d(drop, beyond)
        self._recorder.record_chunk(columns, chunk, drop, act)
        if state is not None:
            started = ends[-1]
            if self._environments.resets_later:
                started = np.zeros(self.num_envs, np.bool_)
                if chunk.autoreset is not None:
                    rows = chunk.autoreset - (len(steps) - 1) * self.num_envs
                    started[rows[rows >= 0]] = True
            state = policy_state.zero_rows(state, started.nonzero()[0]) if started.any() else state
        self._state = state

    def _batch_of_infos(self) -> Batch:
        infos = batch_of(self._infos) if self._infos else node(Batch, {})
        infos.__dict__["env_id"] = self._env_ids
        return infos


class EpisodeQuota:
    """Quota of episodes that a call to `collect` must start and complete.

    Selecting the first episodes to end would bias results towards short episodes.

    - `running`: whether the current episode of each environment belongs to the quota, shape (num_envs,).

    >>> quota = EpisodeQuota(2, n_episode=3)
    >>> quota.spend(np.array([[True, False], [True, False], [False, False]]))
    array([4])
    >>> quota.running, quota.left
    (array([False,  True]), 1)
    """

    def __init__(self, num_envs: int, n_episode: int) -> None:
        self.running: npt.NDArray[np.bool_] = np.arange(num_envs) < n_episode
        self._to_begin = n_episode - int(self.running.sum())
        self._seen_ends = 0

    @property
    def left(self) -> int:
        """Number of episodes that have not been completed yet."""
        return self._to_begin + int(np.count_nonzero(self.running))

    def is_spent_by(self, terminateds: npt.NDArray[np.bool_], truncateds: npt.NDArray[np.bool_]) -> bool:
        """Count the episode ends of one more step of all environments, and return whether the quota may be complete.

        `spend` resets the count. Autoreset steps with set flags are counted as episode ends, so the result may be true
        before the quota is complete.
        """
        if not (np.count_nonzero(terminateds) or np.count_nonzero(truncateds)):
            return False
        self._seen_ends += int(np.count_nonzero((terminateds | truncateds) & self.running))
        return self._seen_ends >= self.left

    def spend(self, ends: npt.NDArray[np.bool_]) -> Rows | None:
        """Subtract the episodes that end in the given steps from the quota.

        - `ends`: whether each step ended an episode, shape (steps, num_envs).

        Returns
        -------
        Rows of the flattened steps that belong to no episode of the quota; None if all rows belong to the quota.
        """
        steps = len(ends)
        self._seen_ends = 0
        # First step of each environment that does not count.
        first = np.where(self.running, steps, 0)
        for step, env in np.argwhere(ends).tolist():
            if not self.running[env]:
                continue
            if self._to_begin:
                self._to_begin -= 1
            else:
                self.running[env] = False
                first[env] = step + 1
        if self.running.all():
            return None
        beyond = (np.arange(steps)[:, None] >= first).ravel().nonzero()[0]
        return beyond if len(beyond) else None


_STACKING_WRAPPERS = ("FrameStack", "FrameStackObservation")
"""Gymnasium's wrappers that stack observations, before and since release 1.0."""


@runtime_checkable
class RemoteBuffer(Protocol):
    """Replay buffer in another process, to which collectors and workers write fragments.

    A remote buffer is picklable, so that each worker can write to the buffer directly.
    """

    def _add_fragment(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Send the steps of a fragment; `eps_id` identifies episodes that continue from earlier fragments."""

    def flush(self) -> None:
        """Wait until the buffer contains all fragments."""

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty the buffer."""


def check_order(owner: str, policy: Any, env: Any, *, makes_policy: bool = False) -> None:
    """Reject an environment passed as the policy, and a policy passed as the environment.

    >>> check_order("Collector", "CartPole-v1", "random")
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: Collector must be called with (policy, env, buffer), got env
        first and policy second
    """
    # A policy has at least one parameter, the observations.
    is_swapped = is_policy(env) or is_environment(policy)
    if is_swapped or (not makes_policy and _parameters(policy) == [] and _parameters(env)):
        raise ArgumentError(f"{owner} must be called with (policy, env, buffer), got env first and policy second")


def is_policy(env: Any) -> bool:
    """Return whether the argument `env` is certainly a policy and not an environment."""
    return is_random(env) or is_space(env) or is_module(env) or isinstance(env, Mapping)


def is_environment(policy: Any) -> bool:
    """Return whether the argument `policy` is certainly an environment or a list of environments, and not a policy."""
    if isinstance(policy, list | tuple):
        return bool(policy) and all(map(is_environment, policy))
    if isinstance(policy, str):
        return "/" in policy or not imports_module(policy)
    if callable(policy):
        return False
    try:
        return not hasattr(policy, "compute_actions") and environment_kind(policy) is not None
    except EnvironmentSpecError:
        return False


def _parameters(function: Any) -> list[inspect.Parameter] | None:
    """List the parameters of a function; return None for other objects, such as callable instances."""
    try:
        return list(inspect.signature(function).parameters.values()) if inspect.isroutine(function) else None
    except (TypeError, ValueError):
        return None


def check_amounts(n_step: int | None, n_episode: int | None) -> None:
    """Require exactly one positive amount."""
    named = {"n_step": n_step, "n_episode": n_episode}
    if sum([whole(name, number) > 0 for name, number in named.items() if number is not None]) != 1:
        raise ArgumentError(
            f"exactly one of n_step and n_episode must be positive, got n_step={n_step} and n_episode={n_episode}"
        )


def as_remote(buffer: Any) -> RemoteBuffer | None:
    """Return the buffer if it is a `RemoteBuffer`; None if there is no buffer or the buffer is in this process."""
    return buffer if isinstance(buffer, RemoteBuffer) else None


def check_buffer(buffer: Any, num_envs: int, *, several: bool = False) -> None:
    """Reject a buffer to which a collector cannot write; accept None and any remote buffer."""
    if buffer is None or as_remote(buffer) is not None:
        return
    # Collectors without a buffer do not import these modules.
    from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
    from samplebatch.buffer.replay import ReplayBuffer

    kind = MultiAgentReplayBuffer if several else ReplayBuffer
    if not isinstance(buffer, kind):
        agents = "several agents" if several else "one agent"
        raise ArgumentError(
            f"buffer must be a {kind.__name__} or a ReplayClient for environments of {agents}, "
            f"got a {type(buffer).__name__}"
        )
    rings = getattr(buffer, "buffer_num", 1)
    if not several and rings < num_envs:
        raise ArgumentError(
            f"buffer must have a ring for each of {num_envs} environments, got {rings}; "
            f"use a VectorReplayBuffer with buffer_num={num_envs}"
        )


def check_stacking(buffer: Any, env: Any) -> None:
    """Reject a buffer that stacks observations if a wrapper of the environment already stacks them."""
    if buffer is None or as_remote(buffer) is not None or buffer.stack_num == 1 or buffer._table.last_frame:
        return
    for layer in env if isinstance(env, list | tuple) else getattr(env, "envs", None) or [env]:
        while layer is not None:
            wrapper = type(layer).__name__
            if wrapper in _STACKING_WRAPPERS:
                raise ArgumentError(
                    f"observations must be stacked once, got the environment's {wrapper} and the buffer's "
                    f"stack_num={buffer.stack_num}; set save_only_last_obs=True in the buffer, or remove one"
                )
            layer = vars(layer).get("env")


_RECURRENT = "_state"
"""Attribute with the recurrent state of the policy, in collectors that store it."""
_NAMES = ("collector", "num_envs", "values", "parts", "environments")

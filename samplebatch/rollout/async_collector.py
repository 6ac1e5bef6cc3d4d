"""Collector that steps each environment as soon as it is ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.env.as_environments import bind_arguments, environment_makers
from samplebatch.env.async_vector import AsyncEnvironments, AsyncStepResult
from samplebatch.env.gymnasium import is_tianshou_vector, waiting_of
from samplebatch.env.infos import Infos, Rows, batch_of, infos_to_rows
from samplebatch.env.registry import Environment
from samplebatch.env.spaces import put
from samplebatch.errors import ArgumentError
from samplebatch.policy import state as policy_state
from samplebatch.policy.action_map import ActionMap
from samplebatch.policy.actor import ActResult
from samplebatch.policy.as_policy import CollectorPolicy
from samplebatch.rollout.collector import Collector, EpisodeQuota, RemoteBuffer, check_order
from samplebatch.rollout.followed_weights import PublishedWeightsSource, WeightsSubscription
from samplebatch.rollout.postprocessing import Hook
from samplebatch.rollout.recorder import EpisodeHook, StepHook

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer


class AsyncCollector(Collector):
    """Collector for environments with slow steps, or with steps of unequal duration.

    Each environment is stepped as soon as it is ready, without waiting for other environments.

    Each environment is created and stepped in a separate process. A vector environment waits for its slowest
    environment in every step. In an `AsyncCollector`, a ready environment continues while other environments are still
    stepping. The policy receives one row per ready environment; `batch.info.env_id` contains the environment of each
    row. The policy's recurrent state is stored per environment.

    Steps that are in flight when `collect` returns are completed in the background and returned by a later call.
    Updates of the policy after the call do not change the actions of steps in flight. `reset_env` waits for steps in
    flight.

    With `n_step`, `collect` returns once `n_step` steps are stored, and may store up to `num_envs` - 1 additional
    steps. With `n_episode`, the first `n_episode` environments each start or continue one episode. An environment that
    completes its episode starts another episode while fewer than `n_episode` episodes have been started. Every started
    episode is stored, because selecting the first episodes to end would favour short episodes. An environment that
    starts no further episode pauses after its reset; environments beyond the first `n_episode` pause immediately. No
    step is dropped, and the next call does not reset the environments.

    If an environment raises or hangs, or its process exits, then `collect` raises `WorkerError`. Steps that were
    recorded before the failure are in the buffer or, without a buffer, in the next batch. After an environment has
    raised, the next call to `collect` starts new episodes in all environments; after an environment process has exited,
    every later call raises `WorkerError`.

    The batches have the same columns as the batches of a `Collector`. With the same seed, each environment produces the
    same trajectories as with `Collector`, independently of the other environments. Faster environments contribute more
    steps.

    Environment processes ignore Ctrl-C, which the parent process handles, and exit when the parent process exits for
    any reason.

    Parameters
    ----------
    policy, env_kwargs, exploration_noise, on_episode_done_hook, hooks, map_action, seed, infos, worker_index, weights
        As in `Collector`.
    env
        A list of functions or ids that each create a `gymnasium.Env`, or one function or id for all environments.
        Unless the start method is `"fork"`, functions are pickled. With cloudpickle, a dependency of Gymnasium,
        functions are pickled by value; otherwise, functions must be importable. Numeric observations are returned
        through shared memory. If `env` is a vector environment of Tianshou, its environment functions are called, and
        its `wait_num` and `timeout` become the defaults of `wait_num` and `timeout_s`.
    buffer
        A `VectorReplayBuffer` with one ring per environment.
    num_envs
        Number of environments to create if `env` is a single function or id; 1 by default.
    on_step_hook
        As in `Collector`, but each call receives the rows whose actions were computed in one call of the policy.
    wait_num
        Number of environments that must have completed a step or reset before the policy computes actions for all ready
        environments. A larger `wait_num` increases the policy's batch size. The default is 1, so that no environment
        waits for another, or all environments if `timeout_s` is set.
    timeout_s
        Maximum time in seconds to wait for `wait_num` environments; after that, one ready environment is sufficient.
    start_method
        Start method of the environment processes: `"spawn"`, `"forkserver"` or `"fork"`.
    stall_timeout_s
        Time in seconds without a reply after which an environment is considered hung and its process is killed. The
        startup of a process is always allowed at least one minute.

    Raises
    ------
    EnvironmentSpecError
        If `env` is of an unknown type, cannot be sent to another process, or does not create single Gymnasium
        environments; or if the environments have different spaces.
    WorkerError
        If the creation of an environment raises, or an environment's process exits.
    PolicySpecError, PolicyNotFoundError
        If the policy has an unsupported type, or one of the `hooks` names a policy other than `default_policy`.
    ArgumentError
        If `num_envs` differs from the number of environments in `env`, `wait_num` is not from 1 to the number of
        environments, `timeout_s` is negative or `stall_timeout_s` not positive.

    Examples
    --------
    >>> with AsyncCollector(
    ...     lambda obs: (obs[:, 2] > 0).astype(int), "CartPole-v1", num_envs=2, seed=1
    ... ) as collector:
    ...     stats = collector.collect(n_episode=6)
    >>> stats.n_collected_episodes, stats.batch["new_obs"].shape == (stats.lens.sum(), 4)
    (6, True)
    """

    _environments: AsyncEnvironments
    _saved_names = (*Collector._saved_names, "_ready", "_said")

    def __init__(
        self,
        policy: CollectorPolicy,
        env: Environment | Sequence[Environment],
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
        wait_num: int | None = None,
        timeout_s: float | None = None,
        start_method: str = "spawn",
        stall_timeout_s: float = 300.0,
    ) -> None:
        check_order(type(self).__name__, policy, env)
        makers = environment_makers(bind_arguments(env, env_kwargs), num_envs)
        if is_tianshou_vector(env) and wait_num is None and timeout_s is None:
            wait_num, timeout_s = waiting_of(env)
        if wait_num is not None and not 1 <= wait_num <= len(makers):
            raise ArgumentError(f"wait_num must be from 1 to {len(makers)}, the number of environments, got {wait_num}")
        if timeout_s is not None and not timeout_s >= 0:
            raise ArgumentError(f"timeout_s must not be negative, got {timeout_s}")
        if not stall_timeout_s > 0:
            raise ArgumentError(f"stall_timeout_s must be positive, got {stall_timeout_s}")
        environments = AsyncEnvironments(makers, start_method=start_method, stall_timeout_s=stall_timeout_s)
        try:
            super().__init__(
                policy,
                cast(Any, environments),
                buffer,
                exploration_noise=exploration_noise,
                on_episode_done_hook=on_episode_done_hook,
                on_step_hook=on_step_hook,
                hooks=hooks,
                map_action=map_action,
                seed=seed,
                infos=infos,
                worker_index=worker_index,
                weights=weights,
            )
        except BaseException:
            environments.close()
            raise
        self.env = env
        self._wait_num = wait_num or (1 if timeout_s is None else self.num_envs)
        self._timeout_s = timeout_s
        self._pending: dict[int, tuple[ActResult, int]] = {}
        self._ready = np.zeros(self.num_envs, np.bool_)
        self._said: list[dict[str, Any]] = []

    @property
    def pids(self) -> list[int]:
        """Process id of each environment."""
        return self._environments.pids

    def close(self) -> None:
        """Close the environments after waiting at most ten seconds for steps in flight; these steps are discarded."""
        super().close()

    @property
    def _has_pending_steps(self) -> bool:
        return super()._has_pending_steps or bool(self._pending)

    def _settle(self) -> None:
        while not self._closed and self._environments.under_way:
            self._record(self._environments.recv(self.num_envs))
        self._pending.clear()

    def _reset_env(self, **arguments: Any) -> tuple[Any, Infos]:
        # Steps in flight count in the next call to `collect`.
        self._ready[:] = False
        self._settle()
        returned = super()._reset_env(**arguments)
        # The caller owns the returned arrays, so later steps must not overwrite them.
        self._obs = [leaf.copy() for leaf in self._obs or ()]
        self._said = infos_to_rows(returned[1], self.num_envs)
        self._ready[:] = True
        return returned

    def _collect_steps(self, n_step: int, *, random: bool, render: float | None) -> None:
        while self._recorder.recorded < n_step:
            self._turn(None, random=random, render=render)

    def _collect_episodes(self, n_episode: int, *, random: bool, render: float | None) -> None:
        quota = EpisodeQuota(self.num_envs, n_episode)
        while quota.left:
            ended = self._turn(quota.running, random=random, render=render)
            if len(ended):
                ends = np.zeros((1, self.num_envs), np.bool_)
                ends[0, ended] = True
                quota.spend(ends)

    def _turn(self, running: npt.NDArray[np.bool_] | None, *, random: bool, render: float | None) -> Rows:
        environments = self._environments
        self._send(running, random=random)
        step = environments.recv(self._wait_num, self._timeout_s, running)
        self._record(step)
        if render is not None:
            environments.render(step.ready)
            if render > 0:
                time.sleep(render)
        return step.ended

    def _send(self, running: npt.NDArray[np.bool_] | None, *, random: bool) -> None:
        envs = (self._ready if running is None else self._ready & running).nonzero()[0]
        if not len(envs):
            return
        obs, actor = [leaf[envs] for leaf in self._obs or ()], self._actor
        if random:
            result = actor.draw(obs, len(envs))
        else:
            info = None
            if actor.takes_batch:
                last_infos = [self._said[env] for env in envs.tolist()]
                info = batch_of(last_infos) if any(last_infos) else node(Batch, {})
                info.__dict__["env_id"] = envs
            result = actor.act(obs, info, policy_state.take(self._state, envs), len(envs))
        self._pending.update({env: (result, row) for row, env in enumerate(envs.tolist())})
        if result.state is not None:
            self._state = policy_state.put(self._state, envs, result.state, self.num_envs)
        elif self._state is not None:
            self._state = policy_state.zero_rows(self._state, envs)
        self._ready[envs] = False
        self._environments.send(envs, result.actions)

    def _record(self, step: AsyncStepResult) -> None:
        decided: dict[int, tuple[ActResult, list[int], list[int]]] = {}
        for position, env in enumerate(step.envs.tolist()):
            act, row = self._pending.pop(env)
            _, positions, rows = decided.setdefault(id(act), (act, [], []))
            positions.append(position)
            rows.append(row)
        for act, positions, rows in decided.values():
            # Environments ascend in decisions and steps alike, so a complete decision is in order.
            if len(rows) < len(act.actions[0]):
                act = act.take(np.array(rows))
            columns, infos = step.columns, step.step_infos
            if len(decided) > 1:
                columns = {name: column[positions] for name, column in columns.items()}
                infos = [infos[position] for position in positions]
            self._recorder.record(
                act.columns | columns, {0: infos} if any(infos) else {}, step.envs[positions], act=act
            )
        if step.obs and self._obs is not None:
            self._obs = [
                put(leaf, step.ready, observations) for leaf, observations in zip(self._obs, step.obs, strict=True)
            ]
        for env, info in zip(step.ready.tolist(), step.infos, strict=True):
            self._said[env] = info
        if len(step.ended):
            self._state = policy_state.zero_rows(self._state, step.ended)
        self._ready[step.ready] = True

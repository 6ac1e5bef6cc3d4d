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
from samplebatch.env.infos import Infos, Rows, batch_of, infos_to_rows
from samplebatch.env.registry import Environment
from samplebatch.env.spaces import put
from samplebatch.env.tianshou import is_tianshou_vector, waiting_of
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
    """Collector for environments whose steps take long, or unequally long: each is stepped as soon as it is ready.

    Each environment is created and stepped in its own process. A vector environment waits in every step for the
    slowest; here, an environment that has answered continues while the others are still stepping. The policy receives
    one row per ready environment, numbered by `batch.info.env_id`; its recurrent state is stored per environment.

    Steps in flight when `collect` returns continue meanwhile, and count in a later call. Their actions are those of
    the earlier policy. `reset_env` waits for them.

    With `n_step`, `collect` steps environments until that many steps are stored: up to `num_envs` - 1 more. With
    `n_episode`, the first `n_episode` environments start or continue an episode each, and an environment that completes
    one starts another while fewer than `n_episode` have been started. Every started episode is stored, because the
    episodes that end first are mostly short. Idle environments pause at the start of an episode; those beyond the first
    `n_episode` pause where they are. No step is dropped, and no environment is reset before the next call.

    If an environment raises, hangs, or its process ends, `collect` raises `WorkerError`. The steps until then are in
    the buffer, if there is one, or in the next batch. After an environment has raised, the next call starts new
    episodes in all environments; after a process has ended, every later call raises.

    Batches have the columns of `Collector` and, per environment, the same trajectories: the same seed gives the same
    data in each environment, independently of the others. Faster environments contribute more steps.

    Processes ignore Ctrl-C, which the parent handles, and exit when the parent process ends for any reason.

    Parameters
    ----------
    policy, env_kwargs, exploration_noise, on_episode_done_hook, hooks, map_action, seed, infos, worker_index, weights
        As for `Collector`.
    env
        Functions or ids that make a `gymnasium.Env` each, in a list; or one for all of them. Where processes do not
        fork, functions are pickled: by value if cloudpickle is installed, as it is with Gymnasium, else they must be
        importable. Observations of numbers come back through shared memory. Of a vector environment of Tianshou, the
        functions that it was made of are used, and its `wait_num` and `timeout` are the defaults here.
    buffer
        A `VectorReplayBuffer` with a ring for each environment.
    num_envs
        How many environments a single function or id makes; 1 by default.
    on_step_hook
        As for `Collector`, but called on environments whose actions were computed together.
    wait_num
        How many environments to wait for before the policy computes actions, resets included; all environments that are
        ready by then are used. 1 by default, so that no environment waits for another; all, if `timeout_s` is given. A
        larger number gives the policy larger batches.
    timeout_s
        Seconds after which fewer are enough, but at least one.
    start_method
        How processes start: `"spawn"`, `"forkserver"` or `"fork"`.
    stall_timeout_s
        Seconds without an answer after which an environment is considered hung and its process is killed. Starting may
        take a minute in any case.

    Raises
    ------
    EnvironmentSpecError
        If there is no such environment, it cannot be sent to another process or is none of Gymnasium's single ones, or
        environments have different spaces.
    WorkerError
        If making an environment raises, or its process ends.
    PolicySpecError
        If the policy cannot be asked for actions.
    PolicyNotFoundError
        If one of the `hooks` names a policy other than `default_policy`.
    ArgumentError
        If `num_envs` does not fit `env`, `wait_num` is not from 1 to the number of environments, `timeout_s` is
        negative or `stall_timeout_s` not positive.

    Examples
    --------
    >>> with AsyncCollector(lambda obs: (obs[:, 2] > 0).astype(int), "CartPole-v1", num_envs=2, seed=1) as collector:
    ...     stats = collector.collect(n_episode=6)
    >>> stats.n_collected_episodes, stats.batch["new_obs"].shape == (stats.lens.sum(), 4)
    (6, True)
    """

    _environments: AsyncEnvironments
    _kept = (*Collector._kept, "_ready", "_said")

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
        """Process ids of the environments, in their order."""
        return self._environments.pids

    def close(self) -> None:
        """Close the environments; wait at most ten seconds for steps in flight, which are dropped."""
        super().close()

    @property
    def _has_pending_steps(self) -> bool:
        return super()._has_pending_steps or bool(self._pending)

    def _settle(self) -> None:
        while not self._closed and self._environments.under_way:
            self._record(self._environments.recv(self.num_envs))
        self._pending.clear()

    def _reset_env(self, **arguments: Any) -> tuple[Any, Infos]:
        # Steps in flight count in the next call of `collect`.
        self._ready[:] = False
        self._settle()
        returned = super()._reset_env(**arguments)
        # The returned arrays must not change.
        self._obs = [leaf.copy() for leaf in self._obs or ()]
        self._said = infos_to_rows(returned[1], self.num_envs)
        self._ready[:] = True
        return returned

    def _collect_steps(self, wanted: int, *, random: bool, render: float | None) -> None:
        while self._recorder.recorded < wanted:
            self._turn(None, random=random, render=render)

    def _collect_episodes(self, wanted: int, *, random: bool, render: float | None) -> None:
        quota = EpisodeQuota(self.num_envs, wanted)
        while quota.left:
            ended = self._turn(quota.running, random=random, render=render)
            if len(ended):
                ends = np.zeros((1, self.num_envs), np.bool_)
                ends[0, ended] = True
                quota.spend(ends)

    def _turn(self, running: npt.NDArray[np.bool_] | None, *, random: bool, render: float | None) -> Rows:
        """Step environments that are ready, record their steps, and return the environments with ended episodes."""
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
                said = [self._said[env] for env in envs.tolist()]
                info = batch_of(said) if any(said) else node(Batch, {})
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
        """Record steps of environments with the decisions that waited for them, and keep the next observations."""
        decided: dict[int, tuple[ActResult, list[int], list[int]]] = {}
        for place, env in enumerate(step.envs.tolist()):
            act, row = self._pending.pop(env)
            _, places, rows = decided.setdefault(id(act), (act, [], []))
            places.append(place)
            rows.append(row)
        for act, places, rows in decided.values():
            # Environments ascend in a decision as they do in a step: all of its rows are in order.
            if len(rows) < len(act.actions[0]):
                act = act.take(np.array(rows))
            columns, infos = step.columns, step.step_infos
            if len(decided) > 1:
                columns = {name: column[places] for name, column in columns.items()}
                infos = [infos[place] for place in places]
            self._recorder.record(act.columns | columns, {0: infos} if any(infos) else {}, step.envs[places], act=act)
        if step.obs and self._obs is not None:
            self._obs = [put(leaf, step.ready, seen) for leaf, seen in zip(self._obs, step.obs, strict=True)]
        for env, said in zip(step.ready.tolist(), step.infos, strict=True):
            self._said[env] = said
        if len(step.ended):
            self._state = policy_state.zero_rows(self._state, step.ended)
        self._ready[step.ready] = True

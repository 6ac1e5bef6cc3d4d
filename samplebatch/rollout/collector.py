"""Collector: lets a policy act in Gymnasium environments, and keeps every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from samplebatch import names
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.as_environments import as_environments
from samplebatch.env.infos import Infos, batch_of
from samplebatch.env.registry import EnvLike
from samplebatch.env.seeds import ENVIRONMENT, POLICY, RANDOM, as_seeds, seed_number, seeds_at
from samplebatch.env.spaces import Columns, Leaf
from samplebatch.errors import EnvironmentSpecError
from samplebatch.policy import state as policy_state
from samplebatch.policy.action_map import ActionMap, map_of_draws, space_to_draw
from samplebatch.policy.actor import Actor, ActResult
from samplebatch.policy.agents import check_options
from samplebatch.policy.as_policy import CollectorPolicy, evaluation_mode, is_random, is_space
from samplebatch.policy.peers import policy_of
from samplebatch.policy.random_by_environment import RandomByEnvironment
from samplebatch.rollout.buffers import RemoteBuffer, as_remote, check_buffer
from samplebatch.rollout.collect_statistics import CollectStats, check_amounts
from samplebatch.rollout.episodes import EpisodeQuota
from samplebatch.rollout.hooks import EpisodeHook
from samplebatch.rollout.postprocessing import Hook, check_hooks, postprocess
from samplebatch.rollout.resuming import Resumable
from samplebatch.rollout.vector_recorder import StepHook, VectorRecorder

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer

_MAX_CHUNK = 288
_MAX_CHUNK_NBYTES = 1 << 25
"""Steps of all environments, and bytes of observations, in a chunk: they are recorded together.

These are 256 steps and an eighth for those that resets take. Twice as many were not faster.
"""


class Collector(Resumable):
    """Let a policy act in one environment or many, and keep every step, in a buffer or as a batch.

    A policy always decides for all environments, row i for environment i. The steps that Gymnasium's vector
    environments spend on resetting are left out, and what an episode's last step led to is always its last observation.

    Without a buffer, `collect` returns a batch of the steps, those of an environment together and in order of time. Its
    columns are `obs`, `new_obs`, `actions`, `rewards` (float64), `terminateds`, `truncateds`, `infos`, and

    - `eps_id`: the episode, 63 random bits, unlike every other process's and every earlier run's, whatever the seed;
    - `env_id`: the environment, counted from 0; `agent_index`: 0;
    - `t`: steps since the episode began; `unroll_id`: the call of `collect`;
    - `policy`: what the policy returned under that name; `action_logp`, `action_prob`, `action_dist_inputs` and
      `vf_preds` if it returned them; `state_in_0`, ... the state that it was given.

    An episode goes on in the next call if it has not ended.

    Parameters
    ----------
    policy
        Anything that `as_policy` takes: a callable on batches or observations, a torch module, an action space; or
        `"random"`. If it has methods `map_action` or `add_exploration_noise`, they are used, as Tianshou's are.
    env
        A Gymnasium environment; a list of environments, which are stepped one after the other in this process; a
        function that makes one, or its id, such as `"CartPole-v1"` (see `environment_factory`), also in lists; or a
        vector environment in any autoreset mode.
    buffer
        A `ReplayBuffer` for one environment, or a `VectorReplayBuffer` with a ring for each; or a `ReplayClient` or
        `ShardedReplayClient`, which gets the steps at the end of each call of `collect`.
    num_envs
        How many environments to make where `env` is a function or an id; by default 1.
    env_kwargs
        Keyword arguments of the functions or ids that make environments.
    exploration_noise
        Whether to let the policy's `add_exploration_noise` change the actions; or a function of actions and batch that
        does. A policy that is `"random"` has none.
    on_episode_done_hook
        Called on the steps of every episode that ended, under Tianshou's names; what it returns, arrays with a row a
        step by name, is kept with the steps. (See `EpisodeHook`.)
    on_step_hook
        Called on what was decided and on the transitions, to which it may add columns. (See `StepHook`.)
    hooks
        Applied to the trajectories of every batch, as `postprocess` does it; only without a buffer.
    map_action
        How actions become what the environments take: `"clip"` to the bounds of the space, `"scale"` from [-1, 1] to
        them, or a function. By default what the policy's `map_action` does, if it has one. Kept are the actions before.
        Random actions are drawn from the space itself: of these only `"scale"` keeps others, from [-1, 1].
    seed
        Seed of the environments, the first time they are reset, and of random actions. With the same seed and a policy
        that draws nothing itself, the data are the same, `eps_id` aside.
    infos
        Whether to keep the infos; policies see them in any case.
    first_unroll_id, first_env_id
        The `unroll_id` of the first call, and the `env_id` of the first environment; those after them count on.

    Attributes
    ----------
    policy, env, buffer
        As given, but for an algorithm, whose policy it is, and for `env` where that was a list, a function or an id: a
        list of the environments.
    num_envs
        How many environments there are.
    collect_step, collect_episode, collect_time
        Steps, episodes that ended, and seconds, since the last `reset_stat`.

    Raises
    ------
    EnvironmentSpecError
        If there is no such environment, it is none of one agent, or the spaces of several differ.
    PolicySpecError
        If the policy cannot be asked for actions.
    PolicyNotFoundError
        If one of the `hooks` names a policy other than `default_policy`.
    ArgumentError
        If the buffer has not a ring for each environment, there are both a buffer and `hooks`, or `num_envs` is not the
        number of environments.

    Examples
    --------
    >>> collector = Collector(lambda obs: (obs[:, 2] > 0).astype(int), "CartPole-v1", num_envs=4, seed=1)
    >>> stats = collector.collect(n_episode=6)
    >>> stats.n_collected_episodes, stats.batch["new_obs"].shape == (stats.lens.sum(), 4)
    (6, True)
    >>> collector.close()
    """

    _kept: ClassVar[Sequence[str]] = (
        "_obs", "_infos", "_state", "_unroll_id", "_seeds", "_env_seeds", "collect_step", "collect_episode",
        "collect_time",
    )  # fmt: skip

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
        first_unroll_id: int = 0,
        first_env_id: int = 0,
    ) -> None:
        self._environments = environments = as_environments(env, num_envs, env_kwargs)
        self.env = env if hasattr(env, "step") and not isinstance(env, type) else environments.env
        self.policy, self.buffer = policy_of(policy), buffer
        self._evaluation_mode = evaluation_mode(self.policy)
        self.num_envs = environments.num_envs
        self._remote = as_remote(buffer)
        check_buffer(buffer, self.num_envs)
        self._hooks = check_hooks(hooks, (names.DEFAULT_POLICY_ID,), buffer=buffer)
        seeds = as_seeds(seed)
        self._env_ids = first_env_id + np.arange(self.num_envs)
        action_seeds, random_seeds, self._env_seeds = (
            seeds_at(seeds, place) for place in (POLICY, RANDOM, ENVIRONMENT)
        )
        env_ids = range(first_env_id, first_env_id + self.num_envs)
        if is_random(policy):
            check_options("exploration_noise", exploration_noise, policy)
            policy, map_action = space_to_draw(map_action, environments.action_space), map_of_draws(map_action)
        if is_space(policy):
            # By environment, so that its data do not depend on how many others there are.
            policy = RandomByEnvironment(policy, env_ids, [seeds_at(random_seeds, env_id) for env_id in env_ids])
        self._seeds: Sequence[int] | None = [seed_number(seeds_at(self._env_seeds, env_id)) for env_id in env_ids]
        self._actor = Actor(
            policy,
            environments.observations,
            environments.actions,
            environments.action_space,
            exploration_noise=exploration_noise,
            map_action=map_action,
            seed=action_seeds,
            hidden=None if buffer is None else "policy.hidden_state",
        )
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
        self._unroll_id = first_unroll_id
        self._closed = False
        self.count_steps: Callable[[int], None] | None = None
        self.constants: dict[str, int] = {}
        self.reset_stat()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the environments."""
        if not self._closed:
            self._closed = True
            self._environments.close()

    # Resetting

    def reset(
        self,
        reset_buffer: bool = True,
        reset_stats: bool = True,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Any, Infos]:
        """Reset the environments and, unless told otherwise, the buffer and the counts; return as `reset_env` does.

        Parameters
        ----------
        reset_buffer
            Whether to empty the buffer.
        reset_stats
            Whether to set the counts to zero.
        gym_reset_kwargs
            Arguments of the environments' own `reset`.
        """
        returned = self.reset_env(gym_reset_kwargs)
        if reset_buffer:
            self.reset_buffer()
        if reset_stats:
            self.reset_stat()
        return returned

    def reset_env(self, gym_reset_kwargs: dict[str, Any] | None = None) -> tuple[Any, Infos]:
        """Start an episode in every environment, and return the observations and infos.

        Episodes that were under way are cut off: in a buffer, their last steps become truncated.

        Parameters
        ----------
        gym_reset_kwargs
            Arguments of the environments' own `reset`, such as `seed` or `options`. Where an environment resets itself
            after an episode, they are not used again.
        """
        if self._closed:
            raise EnvironmentSpecError("the environments must be open to be reset, and the collector has been closed")
        self._recorder.begin()
        self._obs, self._infos = self._environments.reset(seeds=self._seeds, **(gym_reset_kwargs or {}))
        # Later resets go on with the environments' generators: no two episodes shall be alike.
        self._seeds = None
        self._state = None
        return self._environments.observations.nest(self._obs), self._infos

    def reset_buffer(self, keep_statistics: bool = False) -> None:
        """Empty the buffer, if there is one."""
        if self.buffer is not None:
            self.buffer.reset(keep_statistics=keep_statistics)

    def reset_stat(self) -> None:
        """Set the counts of steps, episodes and time to zero."""
        self.collect_step = self.collect_episode = 0
        self.collect_time = 0.0

    # Resuming

    def _parts(self) -> Mapping[str, Any]:
        return {"actor": self._actor, "recorder": self._recorder}

    def _environment_parts(self) -> Sequence[Any]:
        return [self._environments]

    def _begin_with_new_seeds(self) -> None:
        seeds = [seeds_at(self._env_seeds, env_id, self._unroll_id) for env_id in self._env_ids.tolist()]
        self._seeds = [seed_number(own) for own in seeds] if self._unroll_id else self._seeds
        self._obs = self._state = None

    # Collecting

    def collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        reset_before_collect: bool = False,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> CollectStats[SampleBatch]:
        """Collect at least so many steps, or exactly so many episodes.

        With `n_step`, all environments are stepped until that many steps have been kept: up to `num_envs` - 1 more.

        With `n_episode`, an environment goes on after an episode as long as fewer episodes than wanted have been begun,
        so that every one that is begun is kept, be it short or long. Environments with nothing left to do are stepped
        on, because Gymnasium's vector environments only step together, but what they do is dropped; all environments
        are reset before the next call then. Episodes that earlier calls have begun are among those counted.

        Parameters
        ----------
        n_step, n_episode
            How much; one of the two.
        random
            Whether to act at random, instead of as the policy says.
        render
            Seconds to wait after each step, once `env.render()` has been called.
        reset_before_collect
            Whether to reset the environments first, without emptying the buffer. The first call always does.
        gym_reset_kwargs
            Arguments of the environments' own `reset`, for that.

        Raises
        ------
        ValueError
            If not exactly one of `n_step` and `n_episode` is positive.
        EnvironmentSpecError
            If the collector has been closed.
        PolicySpecError
            If the policy gives no actions that fit.
        """
        check_amounts(n_step, n_episode)
        began = time.perf_counter()
        if reset_before_collect or self._obs is None:
            self.reset_env(gym_reset_kwargs)
        elif self._closed:
            raise EnvironmentSpecError("the environments must be open to be stepped, and the collector has been closed")
        try:
            with self._evaluation_mode:
                if n_step:
                    self._collect_steps(n_step, random=random, render=render)
                else:
                    self._collect_episodes(n_episode or 0, random=random, render=render)
        except BaseException:
            # Nobody knows how far the environments got.
            self._obs = None
            raise
        recorded = self._recorder.recorded
        batch, returns, lens = self._recorder.take({names.UNROLL_ID: self._unroll_id, **self.constants})
        if batch is not None and self._hooks:
            batch = postprocess(batch, self._hooks)
        if self._remote is not None and batch:
            self._remote.add_fragment(batch)
            batch = None
        self._unroll_id += 1
        stats = CollectStats.from_counts(
            steps=recorded, time_s=time.perf_counter() - began, returns=returns, lens=lens, batch=batch
        )
        self.collect_step += stats.n_collected_steps
        self.collect_episode += stats.n_collected_episodes
        self.collect_time += stats.collect_time
        return stats

    def _collect_steps(self, wanted: int, *, random: bool, render: float | None) -> None:
        recorder = self._recorder
        while recorder.recorded < wanted:
            self._collect_chunk(wanted - recorder.recorded, None, random=random, render=render)

    def _collect_episodes(self, wanted: int, *, random: bool, render: float | None) -> None:
        quota = EpisodeQuota(self.num_envs, wanted)
        while quota.left:
            self._collect_chunk(_MAX_CHUNK * self.num_envs, quota, random=random, render=render)
        if self.num_envs > 1:
            # They are in the middle of episodes that do not count.
            self._obs = None

    def _collect_chunk(self, wanted: int, quota: EpisodeQuota | None, *, random: bool, render: float | None) -> None:
        """Step all environments until there are so many steps, or all episodes have ended, and record a chunk of them.

        A chunk may be full before.
        """
        limit, rows = 1, self.num_envs
        # A state may have to begin afresh after any step.
        if wanted > rows and render is None and self._state is None and not self._recorder.looks_at_each_step:
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
                made = rows - environments.to_reset
                step = environments.step_raw(result.actions)
                columns.append(result.columns)
                steps.append(step)
                self._obs, self._infos = environments.next_obs(step)
                if self.count_steps is not None:
                    self.count_steps(made)
                wanted -= made
                if wanted <= 0 or result.state is not None:
                    break
                if quota is not None and quota.is_spent_by(step[2], step[3]):
                    break
        finally:
            # Steps that were made are recorded, even if the policy or an environment has failed by now.
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
            begun = ends[-1]
            if self._environments.resets_later:
                begun = np.zeros(self.num_envs, np.bool_)
                if chunk.autoreset is not None:
                    rows = chunk.autoreset - (len(steps) - 1) * self.num_envs
                    begun[rows[rows >= 0]] = True
            state = policy_state.zero_rows(state, begun.nonzero()[0]) if begun.any() else state
        self._state = state

    def _batch_of_infos(self) -> Batch:
        """Make the infos that the policy is told."""
        infos = batch_of(self._infos) if self._infos else node(Batch, {})
        infos.__dict__["env_id"] = self._env_ids
        return infos

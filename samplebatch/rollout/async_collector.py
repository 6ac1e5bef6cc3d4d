"""AsyncCollector: lets a policy act in those environments that are ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.env.async_vector import Answers, AsyncEnvironments, put
from samplebatch.env.infos import Infos, Rows, batch_of, infos_to_rows
from samplebatch.policy import state as policy_state
from samplebatch.policy.actor import ActionMap, ActResult
from samplebatch.rollout.collect_statistics import CollectStats
from samplebatch.rollout.collector import Collector
from samplebatch.rollout.episodes import EpisodeQuota
from samplebatch.rollout.hooks import EpisodeHook
from samplebatch.rollout.postprocessing import Hook
from samplebatch.rollout.vector_recorder import StepHook


class AsyncCollector(Collector):
    """Let a policy act in environments that take long, or unequally long, to step: in each as soon as it is ready.

    The environments are those of a `gymnasium.vector.AsyncVectorEnv`, each in a process of its own. `Collector` waits
    in every step for the slowest. Here whoever has answered is decided for and goes on, while the others are still
    under way. The policy gets a row for each environment that is ready, and `batch.info.env_id` says which those are;
    what it carries from step to step is kept for each environment.

    Steps that are under way when `collect` returns go on meanwhile, and count in a later call. They were decided by
    the policy as it was then.

    What is collected is what `Collector` collects: the same columns and, by environment, the same trajectories. But
    faster environments make more steps.

    Parameters
    ----------
    policy, exploration_noise, on_episode_done_hook, hooks, map_action, seed, first_unroll_id
        As for `Collector`.
    env
        A `gymnasium.vector.AsyncVectorEnv` in any autoreset mode, not wrapped: a wrapper around it would not see the
        steps of single environments. Wrap these instead. While environments are under way, leave it alone: Gymnasium
        refuses to ask them anything then, and `close` of the collector closes it.
    buffer
        A `VectorReplayBuffer` with a ring for each environment.
    on_step_hook
        As for `Collector`, but called on environments that were decided for at the same time.
    wait_num
        How many environments to wait for before the policy is asked again, those that begin an episode included; all
        that are ready by then are taken. By default 1, so that nobody waits for another; all, if there is a
        `timeout_s`. More of them make larger batches for the policy.
    timeout_s
        Seconds after which fewer are enough, but at least one.

    Attributes
    ----------
    policy, env, buffer, num_envs, collect_step, collect_episode, collect_time
        As for `Collector`.

    Raises
    ------
    EnvironmentSpecError
        If `env` is no AsyncVectorEnv, or one whose environments cannot be stepped one by one.
    PolicySpecError
        If the policy cannot be asked for actions.
    ValueError
        If `wait_num` is not from 1 to the number of environments, or `timeout_s` is negative.

    Examples
    --------
    >>> import gymnasium
    >>> env = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="async")
    >>> collector = AsyncCollector(lambda obs: (obs[:, 2] > 0).astype(int), env, seed=1)
    >>> stats = collector.collect(n_episode=6)
    >>> stats.n_collected_episodes, stats.batch["new_obs"].shape == (stats.lens.sum(), 4)
    (6, True)
    >>> collector.close()
    """

    _environments: AsyncEnvironments

    def __init__(
        self,
        policy: Any,
        env: Any,
        buffer: Any = None,
        *,
        exploration_noise: bool | Callable[[Any, Batch], Any] = False,
        on_episode_done_hook: EpisodeHook | None = None,
        on_step_hook: StepHook | None = None,
        hooks: Sequence[Hook] = (),
        map_action: ActionMap | None = None,
        seed: int | np.random.SeedSequence | None = None,
        first_unroll_id: int = 0,
        wait_num: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        environments = AsyncEnvironments(env)
        super().__init__(
            policy,
            environments,
            buffer,
            exploration_noise=exploration_noise,
            on_episode_done_hook=on_episode_done_hook,
            on_step_hook=on_step_hook,
            hooks=hooks,
            map_action=map_action,
            seed=seed,
            first_unroll_id=first_unroll_id,
        )
        self.env = env
        if wait_num is not None and not 1 <= wait_num <= self.num_envs:
            raise ValueError(f"wait_num must be from 1 to {self.num_envs}, the number of environments, got {wait_num}")
        if timeout_s is not None and not timeout_s >= 0:
            raise ValueError(f"timeout_s must not be negative, got {timeout_s}")
        self._wait_num = wait_num or (1 if timeout_s is None else self.num_envs)
        self._timeout_s = timeout_s
        self._pending: dict[int, tuple[ActResult, int]] = {}
        self._ready = np.zeros(self.num_envs, np.bool_)
        self._said: list[dict[str, Any]] = []

    def close(self) -> None:
        """Close the environments; steps under way are waited for, ten seconds at the most, and dropped."""
        super().close()

    def reset_env(self, gym_reset_kwargs: dict[str, Any] | None = None) -> tuple[Any, Infos]:
        """Start an episode in every environment, and return the observations and what was said with them.

        Steps that are under way are waited for, and count in the next call of `collect`. Then the episodes are cut off:
        in a buffer, their last steps become truncated.

        Parameters
        ----------
        gym_reset_kwargs
            Arguments of the environments' own `reset`: `seed`, `options`. Where an environment begins another episode
            later, they are not used again.

        Raises
        ------
        EnvironmentSpecError
            If the collector has been closed.
        WorkerError
            If an environment fails.
        """
        self._ready[:] = False
        while not self._closed and self._environments.under_way:
            self._record(self._environments.wait(self.num_envs))
        self._pending.clear()
        returned = super().reset_env(gym_reset_kwargs)
        # What was returned shall stay as it is.
        self._obs = [leaf.copy() for leaf in self._obs or ()]
        self._said = infos_to_rows(returned[1], self.num_envs)
        self._ready[:] = True
        return returned

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

        With `n_step`, environments are stepped until that many steps have been kept: up to `num_envs` - 1 more.

        With `n_episode`, the first `n_episode` environments begin an episode each, or go on in theirs, and whichever of
        them ends one begins another as long as fewer than wanted have been begun. Every one that is begun is kept,
        whatever its length: those that end first would mostly be short ones. Environments with nothing left to do rest,
        at the beginning of an episode; those beyond the first `n_episode` rest where they are. Nothing is dropped, and
        nothing is reset before the next call.

        Parameters
        ----------
        n_step, n_episode, random, reset_before_collect, gym_reset_kwargs
            As for `Collector.collect`.
        render
            Seconds to wait after each turn, once the environments that are ready have been rendered.

        Raises
        ------
        ValueError
            If not exactly one of `n_step` and `n_episode` is positive.
        EnvironmentSpecError
            If the collector has been closed.
        PolicySpecError
            If the policy gives no actions that fit.
        WorkerError
            If an environment fails or its process ends, as every later call does then: Gymnasium does not start it
            again. Steps made until then are in the buffer, if there is one.
        """
        return super().collect(n_step, n_episode, random, render, reset_before_collect, gym_reset_kwargs)

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
        """Let those environments step that are ready, take down what others did, and return whose episodes ended."""
        environments = self._environments
        self._send(running, random=random)
        answers = environments.wait(self._wait_num, self._timeout_s, running)
        self._record(answers)
        if render is not None:
            environments.render(answers.ready)
            if render > 0:
                time.sleep(render)
        return answers.ended

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
        self._environments.send(result.actions, envs)

    def _record(self, answers: Answers) -> None:
        """Record steps of environments with the decisions that waited for them, and keep what to act on."""
        together: dict[int, tuple[ActResult, list[int], list[int]]] = {}
        for place, env in enumerate(answers.envs.tolist()):
            result, row = self._pending.pop(env)
            _, places, rows = together.setdefault(id(result), (result, [], []))
            places.append(place)
            rows.append(row)
        for result, places, rows in together.values():
            act = result.take(np.array(rows))
            columns = act.columns | answers.columns(np.array(places))
            infos = [answers.outcome[4][place] for place in places]
            self._recorder.record(columns, {0: infos} if any(infos) else {}, answers.envs[places], act=act)
        if answers.obs and self._obs is not None:
            self._obs = [put(leaf, answers.ready, seen) for leaf, seen in zip(self._obs, answers.obs, strict=True)]
        for env, said in zip(answers.ready.tolist(), answers.infos, strict=True):
            self._said[env] = said
        if len(answers.ended):
            self._state = policy_state.zero_rows(self._state, answers.ended)
        self._ready[answers.ready] = True

"""RolloutWorkers: processes that step environments and send fragments."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Literal, Self, get_args

import numpy as np

from samplebatch import names
from samplebatch.arguments import choice, positive, whole
from samplebatch.batch.builder import PolicyMapping
from samplebatch.batch.episodes import run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.column.unpickling import require_permission
from samplebatch.env.as_environments import bind_arguments, list_environments
from samplebatch.env.infos import batch_of
from samplebatch.env.registry import Environment
from samplebatch.env.seeds import as_seeds
from samplebatch.errors import ArgumentError, FormatError, WorkerError
from samplebatch.names import PolicyID
from samplebatch.policy.action_map import ActionMap
from samplebatch.policy.agents import Noise, check_options
from samplebatch.policy.as_policy import PolicyLike
from samplebatch.policy.source import check_policy, label_weights
from samplebatch.rollout.aggregator import join_streams
from samplebatch.rollout.collector import (
    RemoteBuffer,
    Uncopied,
    as_remote,
    check_amounts,
    check_buffer,
    check_order,
    has_pickles,
)
from samplebatch.rollout.postprocessing import Hook, check_hooks
from samplebatch.rollout.statistics import CollectStats, EpisodeStatistics
from samplebatch.workers.backend import Backend, BackendOptions, InlineBackend, Worker
from samplebatch.workers.pool import WorkerPool
from samplebatch.workers.process_backend import ProcessBackend
from samplebatch.workers.ray_backend import RayBackend, RayOptions
from samplebatch.workers.statistics import Received, StepCount, WorkerStats
from samplebatch.workers.task import Fragment, Request, StateRequest, WorkerSpec, shares

_NOT_STARTED = "workers must be started before they can send anything; use them in a with statement"

_NAMES = ("workers", "num_envs", "failures", "version", "weights", "received", "rings", "fragments")

BackendName = Literal["process", "inline", "ray"]

_BACKENDS: dict[BackendName, type[ProcessBackend | InlineBackend | RayBackend]] = {
    "process": ProcessBackend,
    "inline": InlineBackend,
    "ray": RayBackend,
}


class RolloutWorkers(Uncopied):
    """Processes that step environments, as a policy says or at random, for learners that want several cores.

    Use them as a context manager, which starts and stops the processes. There are two ways to collect:

    - `collect` is synchronous: all workers make their share with the newest weights, and the report has all of it in
      one batch, as the reports of `Collector` and `MultiAgentCollector` have. On-policy learners publish and collect
      in turns.
    - `fragments` is asynchronous: workers go on by themselves, and their fragments come in the order in which they
      arrive, a `SampleBatch` each where environments are Gymnasium's, a `MultiAgentBatch` where they are PettingZoo's.

    Rows have the columns of these collectors, and `weights_version`: the number of the weights that a step was made
    with, 0 before the first (see `publish`).

    A fragment lies in the shared memory that the worker wrote it to, which is reused when the last array over it is
    gone. Fragments kept beyond half of a worker's memory are copies: keeping them never stops a worker.

    A worker that raises, dies or hangs is replaced, `max_restarts` times at most: its replacement makes the missing
    steps, in environments of the same ids. A fragment that was not sent completely is dropped (see `worker_stats`).
    Beyond that, `fragments` yields every complete fragment that was sent, then raises `WorkerError`; `collect` raises,
    and `fragments` yields what it had received. Workers ignore Ctrl-C, which is the parent's to handle, and end by
    themselves when their parent is gone, however it ended.

    Parameters
    ----------
    policy
        Who decides: `"random"`; anything that `as_policy` takes and that can be pickled, a torch module for instance;
        a function or class that makes one, of nothing or of `observation_space` and `action_space`; or the name of one
        of these, as `module:function`. With several agents, one for all, or a mapping from policy ids to one each.
    env
        The environment's name, or a function that makes it (see `make_environment`): of one agent or several, or a
        vector environment; or a list of names and functions, one for each environment of all workers, the first for
        `env_id` 0. They go to other processes by pickle, so functions must be importable.
    buffer
        Where the steps go, too, as they arrive: a buffer of one agent with a ring for each environment of all workers,
        ring k for `env_id` k; or a `MultiAgentReplayBuffer`. An episode that a worker left behind is truncated there.
        Or a `ReplayClient`: each worker writes to the service from its own process, fragments that are handed out have
        rewards, flags and ids alone, and `collect` returns when all steps are in the table.
    num_workers
        Number of processes.
    envs_per_worker
        Environments that each of them steps, in turns or as one vector environment.
    env_kwargs
        Keyword arguments of the functions or ids that make environments.
    max_lag
        How old the weights of a fragment may be when it is handed out, in publications since; older ones are dropped,
        and counted in `worker_stats` and among the steps of `fragments`. By default there is no bound.
    policy_mapping
        As for `MultiAgentCollector`; a function must be importable.
    exploration_noise, map_action, infos
        As for `Collector`, or with several agents for `MultiAgentCollector`; functions must be importable.
    seed
        Seed of the run. What happens in the environment of an `env_id` follows from it alone, `eps_id` and `unroll_id`
        aside, however the environments are spread over workers, as long as a policy decides row by row and draws
        nothing, or is `"random"`, and no worker was replaced. In which order fragments arrive is not determined.
    hooks
        Hooks that workers apply to every trajectory, to the part of it that a fragment has: see `postprocess`; only
        without a buffer.
    backend
        `"process"`; `"ray"`, where workers are actors on a cluster of Ray; or `"inline"` to do the same work in this
        process, one worker after the other, for debugging.
    start_method
        How processes start: `"spawn"`, `"forkserver"` or `"fork"`. Actors of Ray start as Ray starts them.
    stall_timeout_s
        Seconds without a step or fragment after which a worker is taken to hang. Time in which nobody asks for
        fragments does not count; and a worker has a minute in any case to start and send its first one.
    max_restarts
        How many workers may be replaced, all together.
    capacity_nbytes
        Size of the memory that a worker's fragments lie in; fragments above half of it arrive in parts.
        By default 64 MiB, less with more than four workers, 8 MiB at least. There is room for weights of this size too,
        and always for those of 16 MiB or the size of the policy. With Ray, one worker's fragments may take half of it
        in the object store, and arrive in one piece; weights have no bound.
    ray_options
        The cluster of Ray, and the resources and placement of each worker; only with that backend.

    Raises
    ------
    EnvironmentSpecError
        If there is no such environment, or it cannot be sent to another process.
    PolicySpecError
        If there is no such policy, or it cannot be sent to another process.
    PolicyNotFoundError
        If one of the `hooks` names a policy that is not among those of `policy`.
    ArgumentError
        If policy and env are swapped, a number is not positive, `max_restarts` or `max_lag` is negative, there is no
        such backend, there are `ray_options` for another one than Ray, both a buffer and `hooks`, or the buffer has too
        few rings.
    MissingExtraError
        If the backend is Ray, and it is not installed.

    Examples
    --------
    >>> with RolloutWorkers("random", "CartPole-v1", envs_per_worker=4, backend="inline") as workers:
    ...     stats = workers.collect(n_step=96)
    >>> stats.n_collected_steps, sorted(set(stats.batch["env_id"].tolist()))
    (96, [0, 1, 2, 3, 4, 5, 6, 7])
    >>> with RolloutWorkers("random", "mpe2/simple_spread_v3", num_workers=1) as workers:
    ...     [fragment.count for fragment in workers.fragments(n_step=100, fragment_length=40)]
    [40, 40, 20]
    """

    def __init__(
        self,
        policy: PolicyLike | str | Mapping[PolicyID, PolicyLike | str],
        env: Environment | Sequence[Environment],
        buffer: ReplayBuffer | MultiAgentReplayBuffer | RemoteBuffer | None = None,
        *,
        num_workers: int = 2,
        envs_per_worker: int = 1,
        env_kwargs: Mapping[str, Any] | None = None,
        max_lag: int | None = None,
        policy_mapping: PolicyMapping | None = None,
        exploration_noise: Noise | Mapping[PolicyID, Noise] = False,
        map_action: ActionMap | Mapping[PolicyID, ActionMap] | None = None,
        hooks: Sequence[Hook] = (),
        seed: int | np.random.SeedSequence | None = None,
        infos: bool = True,
        backend: BackendName = "process",
        start_method: str = "spawn",
        stall_timeout_s: float = 300.0,
        max_restarts: int = 0,
        capacity_nbytes: int | None = None,
        ray_options: RayOptions | None = None,
    ) -> None:
        check_order("RolloutWorkers", policy, env, makes_policy=True)
        whole("num_workers", num_workers, 1)
        whole("envs_per_worker", envs_per_worker, 1)
        if capacity_nbytes is not None:
            whole("capacity_nbytes", capacity_nbytes, 1)
        positive("stall_timeout_s", stall_timeout_s)
        self._max_restarts = whole("max_restarts", max_restarts)
        self._max_lag = None if max_lag is None else whole("max_lag", max_lag)
        hooks = check_hooks(hooks, policy if isinstance(policy, Mapping) else None, buffer=buffer)
        check_options("exploration_noise", exploration_noise, policy)
        check_options("map_action", map_action, policy)
        remote = as_remote(buffer)
        if remote is not None and max_lag is not None:
            raise ArgumentError("max_lag must be left out where workers write to a service: nothing is dropped there")
        check_buffer(buffer, num_workers * envs_per_worker, several=isinstance(buffer, MultiAgentReplayBuffer))
        self._backend = _make_backend(
            backend, BackendOptions(num_workers, policy, start_method, capacity_nbytes, ray_options)
        )
        environments = list_environments(bind_arguments(env, env_kwargs), num_workers * envs_per_worker)
        check_policy(policy)
        make_policy = self._backend.pack_policy(policy)
        seeds = as_seeds(seed)
        self._specs = [
            WorkerSpec(
                index=index,
                envs=environments[index * envs_per_worker : (index + 1) * envs_per_worker],
                policy=make_policy,
                num_envs=envs_per_worker,
                policy_mapping=policy_mapping,
                exploration_noise=exploration_noise,
                map_action=map_action,
                hooks=hooks,
                seed=seeds,
                infos=infos,
                first_unroll_id=index << 32,
                buffer=remote,
            )
            for index in range(num_workers)
        ]
        self.policy, self.buffer = policy, buffer
        self._writer = None if buffer is None or remote is not None else BufferWriter(buffer)
        self._stall_timeout_s = stall_timeout_s
        self._pool: WorkerPool | None = None
        self._received = Received()
        self._leftover: list[Fragment] = []
        """Fragments of a call of `collect` that did not complete."""
        self._requested: Request | None = None
        """All that `request` asked for and `collect` has not received."""
        self._iterated: Request | None = None
        """All that `fragments` asked for, until the last fragment has come."""
        self._stop_requested = False
        self._earlier_versions = 0
        self._one_version = threading.RLock()
        """Held while workers collect with one version of the weights."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, in their order; empty unless processes have been started.

        Actors of Ray are among them once they have answered. Their ids are those of their own machines.
        """
        workers = [] if self._pool is None else self._pool.workers
        return [worker.pid for worker in workers if worker.pid not in (0, os.getpid())]

    @property
    def stats(self) -> CollectStats[Any]:
        """The report on all that was received so far, without the batch."""
        return self._received.stats()

    @property
    def worker_stats(self) -> WorkerStats:
        """Facts about the workers so far: failures, restarts, lost and stale steps, waiting times."""
        return self._received.worker_stats(self._pool)

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Publish weights, which every worker gives to its policy before its next fragment.

        The policy gets them by its method `load_state_dict`, as torch modules have, or `set_weights`. Weights that
        were not asked for before there are newer ones are never loaded. While another thread is in `collect`, this
        waits: a batch of its has one version.

        Parameters
        ----------
        weights
            A dict of arrays and tensors, flat or nested, such as a `state_dict()`. Where the policy is a mapping, one
            such dict for each policy id, those left out keep theirs. They are copied.

        Returns
        -------
        The number of these weights, which fragments made with them have as `weights_version`: 1 for the first.

        Raises
        ------
        CapacityError
            If they are larger than there is room for; a larger `capacity_nbytes` makes more.
        ColumnTypeError
            If they are no dict of arrays and tensors.
        ChannelClosedError
            If the workers have been stopped.
        """
        with self._one_version:
            return self._earlier_versions + self._backend.weights.publish(label_weights(self.policy, weights))

    def __enter__(self) -> Self:
        try:
            self._backend.open(len(self._specs))
            self._pool = WorkerPool(
                self._specs, self._backend, max_restarts=self._max_restarts, stall_timeout_s=self._stall_timeout_s
            )
            if self._stop_requested:
                self._pool.request_stop()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        reset_before_collect: bool = False,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> CollectStats[Any]:
        """Let all workers collect their share with the newest weights, and report on the steps of all.

        Parameters
        ----------
        n_step
            How many steps of all environments together, as many in each, give or take one. Where environments have one
            agent each, those of a worker are stepped together: up to one step more of each of them.
        n_episode
            How many episodes end: exactly so many, and in every worker those that begin first, so that long ones are as
            likely as short ones.
        random, render, reset_before_collect, gym_reset_kwargs
            As for `Collector.collect`, in every worker; a `seed` among the last counts on from `env_id` 0.

        Returns
        -------
        CollectStats
            The report, with the batch in it unless there is a buffer: the steps of each agent lie together, by `env_id`
            and `agent_index`. With several agents, `policies` has a report for each policy.

        Raises
        ------
        ArgumentError
            If not exactly one of the numbers is positive.
        WorkerError
            If workers have not been started, not all fragments of `fragments` have come, or a worker fails that cannot
            be replaced. `fragments` yields what had been received then.
        ColumnMismatchError
            If the columns of different workers cannot be joined.
        """
        began = time.perf_counter()
        count = StepCount()
        found: list[tuple[int, Fragment]] = []
        asked = Request(n_step, n_episode, None, random, render, reset_before_collect, gym_reset_kwargs)
        with self._one_version:
            if self._requested != asked:
                self._begin(asked)
            self._requested = None
            try:
                for one in self._receive(count):
                    found.append(one)
            except BaseException:
                self._leftover += [fragment for _, fragment in found]
                raise
        batch = None if self.buffer is not None else join_streams([one for _, one in sorted(found, key=itemgetter(0))])
        return count.report(time.perf_counter() - began, batch)

    def request(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        reset_before_collect: bool = False,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Let all workers begin with their share, and return at once; `collect` with the same arguments receives it.

        Weights that are published in between reach those workers that have not begun. Other arguments, there or here,
        leave these steps to the next call of `fragments`. Takes arguments and raises as `collect` does.
        """
        with self._one_version:
            self._begin(Request(n_step, n_episode, None, random, render, reset_before_collect, gym_reset_kwargs))

    def receive(self, n_step: int | None = None) -> CollectStats[Any]:
        """Receive steps as they arrive, while workers continue by themselves, and report on them.

        Each worker collects fragments of its share of `n_step`, up to two ahead of the caller, each with the newest
        weights at its beginning, and is asked for more as soon as it has sent them. No worker waits for another. Steps
        that are older than `max_lag` allows are dropped, counted in `worker_stats`, and not part of the report.

        Parameters
        ----------
        n_step
            Return as soon as at least that many steps of all environments together have arrived: less than one fragment
            more. None: receive what was asked for before, and let the workers rest.

        Returns
        -------
        CollectStats
            The report, as `collect` returns it; the batch has the fragments in the order in which they arrived.

        Raises
        ------
        ArgumentError
            If `n_step` is not a whole number from 1.
        WorkerError, ColumnMismatchError
            As `collect` does.

        Examples
        --------
        >>> with RolloutWorkers("random", "CartPole-v1", backend="inline") as workers:
        ...     sizes = [workers.receive(64).n_collected_steps for _ in range(3)]
        ...     sizes, workers.receive().n_collected_steps
        ([64, 64, 64], 64)
        """
        began, count = time.perf_counter(), StepCount()
        fragments: list[Fragment] = []
        pool = self._started()
        self._check_iterated(pool, "send others")
        next_request: Callable[[Worker], Request] | None = None
        if n_step is not None:
            count_envs = len(self._specs) * self._specs[0].num_envs
            share = self._specs[0].num_envs * -(-whole("n_step", n_step, 1) // count_envs)
            request = Request(2 * share, None, share)
            if self._requested is not None:
                self._finish_collect()
            pool.ask({place: request for place, worker in enumerate(pool.workers) if worker.request is None})
            pool.leave()

            def next_request(worker: Worker) -> Request:
                return request

        try:
            if n_step is None or not self._stop_requested:
                for _, fragment in self._receive(count, next_request):
                    fragments.append(fragment)
                    if n_step is not None and count.env_steps >= n_step:
                        break
        except BaseException:
            self._leftover += fragments
            raise
        return count.report(time.perf_counter() - began, None if self.buffer is not None else join_streams(fragments))

    def _begin(self, asked: Request) -> None:
        """Send each worker its share of a request of `collect`."""
        check_amounts(asked.n_step, asked.n_episode)
        pool = self._idle("collect")
        self._ask(pool, asked)
        pool.leave()
        self._requested = asked

    def _ask(self, pool: WorkerPool, asked: Request) -> None:
        """Send each worker its share of a request, if it has one."""
        workers, envs = len(self._specs), self._specs[0].num_envs
        steps, episodes = (shares(amount, workers, envs) for amount in (asked.n_step, asked.n_episode))
        pool.ask(
            {
                place: replace(asked, n_step=n_step, n_episode=n_episode)
                for place, (n_step, n_episode) in enumerate(zip(steps, episodes, strict=True))
                if 0 not in (n_step, n_episode)
            }
        )

    def fragments(
        self, n_step: int | None = None, n_episode: int | None = None, fragment_length: int = 200
    ) -> Iterator[Fragment]:
        """Let all workers collect by themselves, and yield their fragments as they arrive.

        Called with the same arguments while fragments are still to come, it yields these.

        Parameters
        ----------
        n_step
            Environment steps: exactly so many in all fragments together, as many in every environment, give or take
            one.
        n_episode
            Episodes: exactly so many are brought to their end, as many in every environment, give or take one, short
            and long ones alike. Without either number, workers go on until they are stopped.
        fragment_length
            Environment steps in a fragment, of all of a worker's environments together; a worker's last one may have
            fewer. With `n_episode` and several agents a fragment has complete episodes, one of every environment.

        Raises
        ------
        ArgumentError
            If a number is not positive, or both numbers of steps and episodes are given.
        WorkerError
            If workers have not been started, or others of these numbers are still to come; while fragments are
            received, if a worker fails that cannot be replaced.
        """
        asked = Request(n_step, n_episode, fragment_length)
        for name in ("n_step", "n_episode", "fragment_length"):
            if getattr(asked, name) is not None:
                whole(name, getattr(asked, name), 1)
        if n_step is not None and n_episode is not None:
            raise ArgumentError(f"one of n_step and n_episode may be given, got {n_step} and {n_episode}")
        pool = self._pool
        if pool is None:
            raise WorkerError(_NOT_STARTED)
        if pool.workers and not (self._iterated == asked and pool.busy):
            self._check_iterated(pool, "send others")
            self._finish_collect()
            self._ask(pool, asked)
            pool.leave()
            self._iterated = asked
        return self._yield_fragments()

    def _yield_fragments(self) -> Iterator[Fragment]:
        while self._leftover:
            yield self._leftover.pop(0)
        for _, fragment in self._receive():
            yield fragment
            del fragment
        self._iterated = None

    def _finish_collect(self) -> None:
        """Receive the rest of a call of `collect` that was interrupted, or of a request that nobody collected."""
        self._requested = None
        self._leftover += [fragment for _, fragment in self._receive()]

    def _receive(
        self, count: StepCount | None = None, next_request: Callable[[Worker], Request | None] | None = None
    ) -> Iterator[tuple[int, Fragment]]:
        """Yield the fragments of all requests, each with the index of its worker; stop all workers on a failure."""
        pool = self._pool
        if pool is None:
            return
        failure: WorkerError | None = None
        try:
            for worker, (fragment, ended) in pool.receive(next_request):
                if self._count(worker, fragment, ended, count):
                    yield worker.spec.index, fragment
                del fragment
        except WorkerError as error:
            failure = error
        if failure is not None or pool.is_stopping():
            yield from self._stop(count)
        if failure is not None:
            raise failure

    def _count(self, worker: Worker, fragment: Fragment, ended: EpisodeStatistics, count: StepCount | None) -> bool:
        """Count a fragment, and write it to the buffer; return whether it is not stale."""
        version = self._received.add(worker, fragment, ended)
        if self._max_lag is not None:
            lag = self._earlier_versions + self._backend.weights.version - version
            if lag > self._max_lag:
                self._received.drop(fragment)
                return False
        self._received.keep(fragment, ended)
        if count is not None:
            count.add(fragment, ended)
        if self._writer is not None:
            self._writer.add(fragment)
        return True

    def _started(self) -> WorkerPool:
        if self._pool is None:
            raise WorkerError(_NOT_STARTED)
        if not self._pool.workers:
            raise WorkerError("workers must be running to collect, and they have been stopped")
        return self._pool

    def _idle(self, purpose: str) -> WorkerPool:
        """Return workers that have done all that they were asked for."""
        self._check_iterated(self._started(), purpose)
        self._finish_collect()
        return self._started()

    def _check_iterated(self, pool: WorkerPool, purpose: str) -> None:
        if self._iterated is not None and pool.busy:
            raise WorkerError(f"an iteration over workers must have come to its end before they {purpose}")

    # Resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run between two calls of `collect`, for `load_state_dict`.

        Each worker tells that of its collector (see `Collector.state_dict`), of its policy's exploration, such as a
        noise's drift, and of its process's own generators. With
        these go the newest weights that were published and their number, the episodes under way, the report `stats`,
        and all that keeps replacements from repeating data. The policy, the hooks and the buffer have states of their
        own; `worker_stats` begins again.

        Returns
        -------
        dict
            Plain values, arrays and tensors, which can be pickled, and `why_reset`: None if environments go on exactly.

        Raises
        ------
        WorkerError
            If workers have not been started, fragments are still to come, a policy's state cannot be saved,
            or a worker fails that cannot be replaced.

        Examples
        --------
        >>> from samplebatch import RolloutWorkers
        >>> one, other = (RolloutWorkers("random", "CartPole-v1", backend="inline", seed=seed) for seed in (1, 2))
        >>> with one, other:
        ...     _ = one.collect(n_step=100)
        ...     other.load_state_dict(one.state_dict(), allow_pickle=True)
        ...     (one.collect(n_step=100).batch["obs"] == other.collect(n_step=100).batch["obs"]).all()
        np.True_
        """
        with self._one_version:
            self._idle("tell their state")
            told = self._exchange([StateRequest()] * len(self._specs))
            pool = self._started()
            version = self._backend.weights.version
            for place, (worker, own) in enumerate(zip(pool.workers, told, strict=True)):
                if "refused" in own:
                    raise WorkerError(f"worker {place} cannot tell its state: {own['refused']}")
                own["seed"] = worker.spec.seed
                own["next_unroll_id"] = worker.spec.first_unroll_id + worker.fragments
            return {
                "workers": told,
                "num_envs": self._specs[0].num_envs,
                "failures": pool.earlier_failures + len(pool.failures),
                "version": self._earlier_versions + version,
                "weights": self._backend.weights.latest().value if version else None,
                "received": self._received.state_dict(),
                "rings": None if self._writer is None else self._writer.state_dict(),
                "fragments": [fragment.copy() for fragment in self._leftover],
                "why_reset": next((why for own in told if (why := own["task"]["collector"]["why_reset"])), None),
            }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Continue where workers were that were made with the same arguments; the seed is the one of those.

        Workers get the weights that were the newest, and number those to come from there on.

        Parameters
        ----------
        state
            A state that `state_dict` returned.
        allow_pickle
            Whether the environments in it may be unpickled, which runs code that the state's writer chose.

        Raises
        ------
        UntrustedPickleError
            If there are environments in it and `allow_pickle` is false. Nothing has changed then.
        FormatError
            If the state is not whole. Nothing has changed then.
        ArgumentError
            If it is of other numbers of workers or environments, or of another kind of collector; or it has no weights,
            and some have been published here. Nothing has changed then.
        WorkerError
            If workers have not been started, fragments are still to come, or a worker fails that cannot be
            replaced, as it does where environments are of other classes.
        """
        missing = [name for name in _NAMES if name not in state]
        if missing:
            raise FormatError(f"the state of workers must have {missing[0]!r}, got one without it")
        with self._one_version:
            self._idle("load a state")
            found, wanted = (
                (len(workers), envs)
                for workers, envs in ((state["workers"], state["num_envs"]), (self._specs, self._specs[0].num_envs))
            )
            if found != wanted:
                raise ArgumentError(
                    f"the state must be of {wanted[0]} workers with {wanted[1]} environments each, got one of "
                    f"{found[0]} with {found[1]}"
                )
            published = self._backend.weights.version
            if state["weights"] is None and published:
                raise ArgumentError("a state without weights must be loaded before any are published")
            collectors = [own["task"]["collector"] for own in state["workers"]]
            if any(map(has_pickles, collectors)):
                require_permission("the state of workers", allow_pickle=allow_pickle)
            # A worker that is still starting reads nothing: to send it much would be to wait without an end.
            for own, its in zip(self._exchange([StateRequest()] * len(self._specs)), collectors, strict=True):
                _check_alike(own, its)
            earlier_versions = state["version"] - published - (state["weights"] is not None)
            self._exchange([StateRequest(state=own, earlier_versions=earlier_versions) for own in state["workers"]])
            self._load(state, earlier_versions)

    def _load(self, state: Mapping[str, Any], earlier_versions: int) -> None:
        """Load the part of a state that is not the workers'."""
        pool = self._started()
        for worker, own in zip(pool.workers, state["workers"], strict=True):
            worker.spec = replace(
                worker.spec,
                seed=own["seed"],
                first_unroll_id=own["next_unroll_id"],
                earlier_versions=earlier_versions,
            )
        pool.earlier_failures = state["failures"]
        self._earlier_versions = earlier_versions
        if state["weights"] is not None:
            self._backend.weights.publish(state["weights"])
        self._received.load_state_dict(state["received"])
        if self._writer is not None and state["rings"] is not None:
            self._writer.load_state_dict(state["rings"])
        self._leftover = [fragment.copy() for fragment in state["fragments"]]

    def _exchange(self, requests: Sequence[StateRequest]) -> list[dict[str, Any]]:
        """Send workers a request each, and return their answers."""
        self._started().ask(dict(enumerate(requests)))
        self._finish_collect()
        return [dict(worker.answer) for worker in self._started().workers if requests[0].state is None]

    # Stopping

    def request_stop(self) -> None:
        """Let `fragments` end soon, after the complete fragments that have been sent; signal handlers may call this.

        A call of `collect` then reports on what it has until then. Asked for while workers start, it ends the first.
        """
        self._stop_requested = True
        if self._pool is not None:
            self._pool.request_stop()

    def stop(self) -> list[Fragment]:
        """End all workers, and return the whole fragments that they had sent and nobody has received.

        Workers have two seconds to close their environments; after that they are killed.
        """
        return [fragment for _, fragment in self._stop()]

    def _stop(self, count: StepCount | None = None) -> list[tuple[int, Fragment]]:
        pool = self._pool
        try:
            drained = [] if pool is None else pool.drain()
            return [
                (worker.spec.index, fragment)
                for worker, (fragment, ended) in drained
                if self._count(worker, fragment, ended, count)
            ]
        finally:
            if pool is not None:
                pool.close()
            self._backend.close()


def _make_backend(name: BackendName, options: BackendOptions) -> Backend:
    """Make a backend by its name; nothing is started."""
    choice("backend", name, get_args(BackendName))
    if options.ray_options is not None and name != "ray":
        raise ArgumentError(f"ray_options must be None unless backend is 'ray', got some with backend {name!r}")
    return _BACKENDS[name](options)


def _check_alike(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse the state of a collector for a worker that has another one."""
    mine = own.get("task", {}).get("collector")
    if mine is None:
        return
    wanted, found = ((one["collector"], one["num_envs"]) for one in (mine, state))
    if found != wanted:
        raise ArgumentError(
            f"the state must be of workers with a {wanted[0]} of {wanted[1]} environments, got one with a {found[0]} "
            f"of {found[1]}"
        )


_IDS = (names.EPS_ID, names.ENV_ID, names.AGENT_INDEX, names.T, names.UNROLL_ID)
"""Columns that a ring needs no more: it has its environment's steps in order, and knows where episodes begin."""


class BufferWriter:
    """Writer of fragments into a replay buffer, for `RolloutWorkers`: ring k holds the environment of `env_id` k.

    Fragments of one environment come in order. Where one does not go on with the episode of the one before, because
    the worker was replaced or steps between were not handed out, the newest step of the ring becomes truncated: no
    episode in the buffer has a gap.

    Parameters
    ----------
    buffer
        A buffer of one agent with a ring for each environment, or a `MultiAgentReplayBuffer`, which knows by itself
        which steps follow each other.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._next: dict[int, tuple[int, int]] = {}
        """Episode and time of the step that goes on in the ring of each environment, where an episode is under way."""

    def state_dict(self) -> dict[int, tuple[int, int]]:
        """Return where the episodes under way go on, for `load_state_dict`; the buffer has a state of its own."""
        return dict(self._next)

    def load_state_dict(self, state: Mapping[int, tuple[int, int]]) -> None:
        """Go on with the episodes of another writer to a buffer of the same rows."""
        self._next = dict(state)

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Write a fragment."""
        several = isinstance(fragment, MultiAgentBatch)
        if several != isinstance(self._buffer, MultiAgentReplayBuffer):
            raise ArgumentError(
                f"buffer must be a {'MultiAgentReplayBuffer' if several else 'buffer of one agent'} for these "
                f"environments, got a {type(self._buffer).__name__}"
            )
        if isinstance(fragment, MultiAgentBatch):
            self._buffer.add(fragment)
        elif fragment.count:
            self._add_rows(fragment)

    def _add_rows(self, steps: SampleBatch) -> None:
        env_id, eps_id, t = (np.asarray(steps[name]) for name in (names.ENV_ID, names.EPS_ID, names.T))
        check_buffer(self._buffer, int(env_id.max()) + 1)
        starts = run_starts(env_id)
        lasts = np.append(starts[1:], len(env_id)) - 1
        done = np.asarray(steps[names.DONES])
        cut = []
        for start, last in zip(starts.tolist(), lasts.tolist(), strict=True):
            env = int(env_id[start])
            due = self._next.pop(env, None)
            if due is not None and due != (int(eps_id[start]), int(t[start])):
                cut.append(env)
            if not done[last]:
                self._next[env] = int(eps_id[last]), int(t[last]) + 1
        if cut:
            self._truncate(cut)
        rows = steps.select(*[name for name in steps if name not in _IDS]).as_batch(convention="tianshou")
        rows.pop("done", None)
        infos = rows.pop("info", None)
        if infos is not None and any(infos):
            rows.info = batch_of(infos.tolist())
        self._buffer.add(rows, buffer_ids=env_id)

    def _truncate(self, rings: list[int]) -> None:
        """Mark the newest step in some rings as the last that there is of its episode."""
        buffer = self._buffer
        newest = buffer.unfinished_index()
        own = np.searchsorted(buffer.subbuffer_edges, newest, "right") - 1
        slots = newest[np.isin(own, rings)]
        if len(slots):
            buffer.truncated[slots] = True
            buffer.done[slots] = True

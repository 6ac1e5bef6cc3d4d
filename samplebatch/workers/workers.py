"""Rollout workers, which step environments in separate processes and send fragments."""

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
from samplebatch.arguments import choice, positive, suggest_names, whole
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
from samplebatch.rollout import collector
from samplebatch.rollout.aggregator import join_streams
from samplebatch.rollout.postprocessing import Hook, check_hooks
from samplebatch.rollout.statistics import CollectStats, EpisodeStatistics
from samplebatch.workers.backend import Backend, BackendOptions, InlineBackend, ProcessBackend, Worker
from samplebatch.workers.pool import Received, StepCount, WorkerPool, WorkerStats
from samplebatch.workers.ray_backend import RayBackend, RayOptions
from samplebatch.workers.task import Fragment, Request, StateRequest, WorkerSpec, shares

_NOT_STARTED = "workers must be started before they can send anything; use them in a with statement"

_NAMES = ("workers", "num_envs", "failures", "version", "weights", "received", "rings", "fragments")

BackendName = Literal["process", "inline", "ray"]

_BACKENDS: dict[BackendName, type[ProcessBackend | InlineBackend | RayBackend]] = {
    "process": ProcessBackend,
    "inline": InlineBackend,
    "ray": RayBackend,
}


class RolloutWorkers(collector.Uncopied):
    """Worker processes that step environments with a policy or random actions, and send fragments of the steps.

    Use the workers as a context manager, which starts and stops the processes. There are two ways to collect steps:

    - `collect` is synchronous: all workers collect with the newest weights, and the result contains all steps in one
      batch, like the results of `Collector` and `MultiAgentCollector`. On-policy learners alternate `publish` and
      `collect`.
    - `fragments` is asynchronous: workers collect independently of each other, and their fragments are yielded in order
      of arrival. A fragment is a `SampleBatch` for Gymnasium environments and a `MultiAgentBatch` for PettingZoo
      environments.

    Rows have the columns of `Collector` or `MultiAgentCollector`, and `weights_version`: the version of the weights
    with which the policy computed the step, or 0 before the first publication (see `publish`).

    The arrays of a fragment are views of the shared memory to which the worker wrote; the memory is reused after the
    last of these arrays has been deleted. If existing fragments occupy half of a worker's memory, further fragments are
    copied to private memory, so that fragments never block a worker.

    A worker that raises an exception, dies or hangs is replaced; at most `max_restarts` workers are replaced in total.
    The replacement collects the missing steps in environments with the ids of the failed worker's environments. A
    fragment that a failed worker did not send completely is discarded (see `worker_stats`). If a worker fails after
    `max_restarts` replacements, `fragments` yields every complete fragment that was sent, then raises `WorkerError`. If
    a worker fails after `max_restarts` replacements during `collect`, `collect` raises `WorkerError` immediately, and
    the next call to `fragments` yields the fragments that `collect` had received. Workers ignore Ctrl-C, which the
    parent handles, and exit when the parent process exits for any reason.

    Parameters
    ----------
    policy
        `"random"`; anything picklable that `as_policy` accepts, for example a torch module; a function or class that
        creates such a policy, without arguments or with `observation_space` and `action_space`; or the name of such a
        function or class, as `module:function`. With several agents, one policy for all agents, or a mapping from
        policy ids to policies.
    env
        Environment id, or function that creates a single-agent, multi-agent or vector environment (see
        `make_environment`); or a list of one id or function per environment of all workers, in order of `env_id`.
        Functions must be importable, because functions are pickled to other processes.
    buffer
        Buffer to which steps are added as they arrive: a single-agent buffer with one ring per environment of all
        workers, in which ring k stores `env_id` k; or a `MultiAgentReplayBuffer`. Unfinished episodes of a failed
        worker are truncated. Alternatively, a `ReplayClient`, with which each worker writes to the service from its own
        process. Returned fragments contain only rewards, flags and ids; `collect` returns when all steps are in the
        service's table.
    num_workers
        Number of processes.
    envs_per_worker
        Number of environments per process, which are stepped sequentially or as one vector environment.
    env_kwargs
        Keyword arguments for the functions or ids that create environments.
    max_lag
        Maximum number of publications since the weights of a returned fragment; unlimited by default. Fragments whose
        weights are older are discarded; `worker_stats` counts the discarded steps, and these steps count towards
        `n_step` of `fragments`.
    policy_mapping
        As in `MultiAgentCollector`; functions must be importable.
    exploration_noise, map_action, infos
        As in `Collector` or, with several agents, in `MultiAgentCollector`; functions must be importable.
    seed
        Seed of the run. Except for the columns `eps_id` and `unroll_id`, the seed determines the data of each `env_id`,
        regardless of the distribution of environments over workers. The data are reproducible only if no worker is
        replaced, and the policy is `"random"` or computes each row independently and deterministically. The seed does
        not determine the order of fragments.
    hooks
        Hooks that workers apply to each trajectory, or part of a trajectory, in a fragment (see `postprocess`); only
        without a buffer.
    backend
        `"process"` for processes on this machine; `"ray"` for actors on a Ray cluster; or `"inline"` for sequential
        workers in this process, which is useful for debugging.
    start_method
        Start method of the worker processes: `"spawn"`, `"forkserver"` or `"fork"`. Not used with Ray.
    stall_timeout_s
        Time in seconds without a step or fragment after which a worker is considered hung. Time during which no caller
        waits for fragments is not included. For startup and for the first fragment, the limit is at least one minute.
    max_restarts
        Maximum number of replaced workers in total.
    capacity_nbytes
        Size of the memory for a worker's fragments in bytes; fragments larger than half of this memory are sent in
        parts. The default is 64 MiB for up to four workers; with more workers, the default decreases to at least 8 MiB.
        The maximum size of weights is the largest of `capacity_nbytes`, 16 MiB and the size of the policy. With Ray,
        the fragments of a worker may occupy half of `capacity_nbytes` in the object store and are sent in one piece;
        the size of weights is unlimited.
    ray_options
        Cluster of the workers, and resources and placement of each worker; only with the backend `"ray"`.

    Raises
    ------
    EnvironmentSpecError
        If the environment is of an unknown type or cannot be sent to another process.
    PolicySpecError
        If the policy is of an unsupported type or cannot be sent to another process.
    PolicyNotFoundError
        If one of the `hooks` requires a policy that `policy` lacks.
    ArgumentError
        If `policy` and `env` are swapped; if a number is not positive, or `max_restarts` or `max_lag` is negative; if
        the backend is unknown, or `ray_options` are passed for another backend; if both a buffer and `hooks` are
        passed, or the buffer has fewer rings than environments.
    MissingExtraError
        If the backend is `"ray"` and Ray is not installed.

    Examples
    --------
    >>> with RolloutWorkers(
    ...     "random", "CartPole-v1", envs_per_worker=4, backend="inline"
    ... ) as workers:
    ...     stats = workers.collect(n_step=96)
    >>> stats.n_collected_steps, sorted(set(stats.batch["env_id"].tolist()))
    (96, [0, 1, 2, 3, 4, 5, 6, 7])
    >>> with RolloutWorkers("random", "mpe2/simple_spread_v3", num_workers=1) as workers:
    ...     [fragment.count for fragment in workers.fragments(n_step=100, fragment_length=40)]
    [40, 40, 20]
    """

    @suggest_names(n_workers="num_workers", num_envs="num_workers", workers="num_workers")
    def __init__(
        self,
        policy: PolicyLike | str | Mapping[PolicyID, PolicyLike | str],
        env: Environment | Sequence[Environment],
        buffer: ReplayBuffer | MultiAgentReplayBuffer | collector.RemoteBuffer | None = None,
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
        collector.check_order("RolloutWorkers", policy, env, makes_policy=True)
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
        remote = collector.as_remote(buffer)
        if remote is not None and max_lag is not None:
            raise ArgumentError(
                f"max_lag must be None if workers write to a service, which drops no fragments, got {max_lag}"
            )
        collector.check_buffer(
            buffer, num_workers * envs_per_worker, several=isinstance(buffer, MultiAgentReplayBuffer)
        )
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
        """Fragments of a failed call to `collect`."""
        self._requested: Request | None = None
        """Request of `request` that `collect` has not received."""
        self._iterated: Request | None = None
        """Request of `fragments`, until the last fragment has been received."""
        self._stop_requested = False
        self._earlier_versions = 0
        self._one_version = threading.RLock()
        """Locked while workers collect with one version of the weights."""

    @property
    def pids(self) -> list[int]:
        """Process id of each worker, in order of the workers; empty if no worker processes have been started.

        The process id of a Ray actor, which is valid on the actor's machine, is included after the actor's first reply.
        """
        workers = [] if self._pool is None else self._pool.workers
        return [worker.pid for worker in workers if worker.pid not in (0, os.getpid())]

    @property
    def stats(self) -> CollectStats[Any]:
        """Statistics of all steps received so far, without a batch."""
        return self._received.stats()

    @property
    def worker_stats(self) -> WorkerStats:
        """Statistics of the workers so far: failures, restarts, lost steps, stale steps and waiting time."""
        return self._received.worker_stats(self._pool)

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Publish weights, which every worker loads into its policy before its next fragment.

        The policy loads the weights with its method `load_state_dict` (as torch modules have) or `set_weights`. If
        newer weights are published before a worker loads a version, the worker skips this version. While another thread
        is in `collect`, `publish` blocks, because all steps of a batch use the same version of the weights.

        Parameters
        ----------
        weights
            A dict of arrays and tensors, flat or nested, such as a `state_dict()`. If the policy is a mapping, a
            mapping from policy ids to dicts of arrays and tensors; the weights of omitted policies are unchanged. The
            weights are copied.

        Returns
        -------
        Version of the weights, which is stored as `weights_version` in fragments; the first version is 1.

        Raises
        ------
        CapacityError
            If the weights exceed the available memory; increase `capacity_nbytes`.
        ColumnTypeError, ChannelClosedError
            If the weights are not a dict of arrays and tensors, or the workers have been stopped.
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

    @suggest_names(n_steps="n_step", num_steps="n_step", steps="n_step", n_episodes="n_episode", episodes="n_episode")
    def collect(
        self,
        n_step: int | None = None,
        n_episode: int | None = None,
        random: bool = False,
        render: float | None = None,
        reset_before_collect: bool = False,
        gym_reset_kwargs: dict[str, Any] | None = None,
    ) -> CollectStats[Any]:
        """Collect steps or episodes in all workers with the newest weights.

        Parameters
        ----------
        n_step
            Total number of steps, distributed evenly over environments. The single-agent environments of a worker are
            stepped together, so each environment may contribute one additional step.
        n_episode
            Number of episodes to complete. Every worker completes the episodes that start first, so that the result is
            not biased towards short episodes.
        random, render, reset_before_collect, gym_reset_kwargs
            As in `Collector.collect`, in every worker. A `seed` in `gym_reset_kwargs` is the seed of `env_id` 0; the
            environment with `env_id` i is reset with `seed + i`.

        Returns
        -------
        CollectStats
            Statistics of the steps, and the batch unless steps are written to a buffer. The batch is sorted by
            `env_id`, `agent_index` and time. With several agents, `policies` contains statistics per policy.

        Raises
        ------
        ArgumentError
            If not exactly one of `n_step` and `n_episode` is positive.
        WorkerError
            If workers have not been started, an iteration over `fragments` is not exhausted, or a worker fails and
            cannot be replaced. After a failure, the next call to `fragments` yields the fragments received before the
            failure.
        ColumnMismatchError
            If the columns of different workers cannot be concatenated.
        """
        began = time.perf_counter()
        count = StepCount()
        received: list[tuple[int, Fragment]] = []
        requested = Request(n_step, n_episode, None, random, render, reset_before_collect, gym_reset_kwargs)
        with self._one_version:
            if self._requested != requested:
                self._begin(requested)
            self._requested = None
            try:
                for item in self._receive(count):
                    received.append(item)
            except BaseException:
                self._leftover += [fragment for _, fragment in received]
                raise
        batch = (
            None if self.buffer is not None else join_streams([item for _, item in sorted(received, key=itemgetter(0))])
        )
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
        """Start collecting in all workers and return immediately; `collect` with the same arguments receives the steps.

        Workers that have not started to collect yet use weights that are published between `request` and `collect`. If
        `collect` is called with other arguments, `collect` raises an error, and the next call to `fragments` yields the
        requested steps. `collect` describes the parameters and errors.
        """
        with self._one_version:
            self._begin(Request(n_step, n_episode, None, random, render, reset_before_collect, gym_reset_kwargs))

    def receive(self, n_step: int | None = None) -> CollectStats[Any]:
        """Receive steps in order of arrival, while the workers collect continuously.

        The length of a fragment is `n_step` divided by the number of workers, rounded up to a multiple of a worker's
        number of environments. Each worker collects up to two fragments ahead of the caller, and loads the newest
        weights before each fragment. A worker that has sent all steps of its request receives a new request. No worker
        waits for another. Fragments whose weights are older than `max_lag` permits are discarded, counted in
        `worker_stats`, and excluded from the result.

        Parameters
        ----------
        n_step
            Total number of steps to wait for; at most one additional fragment is returned. None receives pending
            fragments and sends no further requests.

        Returns
        -------
        CollectStats
            Statistics of the steps, as in `collect`; the batch contains the fragments in order of arrival.

        Raises
        ------
        ArgumentError
            If `n_step` is not a positive integer.
        WorkerError, ColumnMismatchError
            As in `collect`.

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
            pool.ask({position: request for position, worker in enumerate(pool.workers) if worker.request is None})
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

    def _begin(self, requested: Request) -> None:
        collector.check_amounts(requested.n_step, requested.n_episode)
        pool = self._idle("collect")
        self._ask(pool, requested)
        pool.leave()
        self._requested = requested

    def _ask(self, pool: WorkerPool, requested: Request) -> None:
        workers, envs = len(self._specs), self._specs[0].num_envs
        steps, episodes = (shares(amount, workers, envs) for amount in (requested.n_step, requested.n_episode))
        pool.ask(
            {
                position: replace(requested, n_step=n_step, n_episode=n_episode)
                for position, (n_step, n_episode) in enumerate(zip(steps, episodes, strict=True))
                if 0 not in (n_step, n_episode)
            }
        )

    def fragments(
        self, n_step: int | None = None, n_episode: int | None = None, fragment_length: int = 200
    ) -> Iterator[Fragment]:
        """Collect in all workers asynchronously, and yield fragments in order of arrival.

        While fragments are pending, a call with the arguments of the previous call yields the pending fragments.

        Parameters
        ----------
        n_step
            Total number of environment steps in all fragments, distributed evenly over environments.
        n_episode
            Number of episodes to complete, distributed evenly over environments, regardless of episode lengths. Without
            `n_step` and `n_episode`, workers continue until they are stopped.
        fragment_length
            Number of environment steps per fragment, in total over the environments of a worker; the last fragment of a
            worker may contain fewer steps. With `n_episode` and several agents, a fragment contains one complete
            episode per environment.

        Raises
        ------
        ArgumentError
            If a number is not positive, or both `n_step` and `n_episode` are passed.
        WorkerError
            If workers have not been started, or fragments of a call with other arguments are pending; or if, during
            iteration, a worker fails and cannot be replaced.
        """
        requested = Request(n_step, n_episode, fragment_length)
        for name in ("n_step", "n_episode", "fragment_length"):
            if getattr(requested, name) is not None:
                whole(name, getattr(requested, name), 1)
        if n_step is not None and n_episode is not None:
            raise ArgumentError(f"at most one of n_step and n_episode must be passed, got {n_step} and {n_episode}")
        pool = self._pool
        if pool is None:
            raise WorkerError(_NOT_STARTED)
        if pool.workers and not (self._iterated == requested and pool.busy):
            self._check_iterated(pool, "send others")
            self._finish_collect()
            self._ask(pool, requested)
            pool.leave()
            self._iterated = requested
        return self._yield_fragments()

    def _yield_fragments(self) -> Iterator[Fragment]:
        while self._leftover:
            yield self._leftover.pop(0)
        for _, fragment in self._receive():
            yield fragment
            del fragment
        self._iterated = None

    def _finish_collect(self) -> None:
        """Receive the remaining fragments of an interrupted `collect`, or of a request not received by `collect`."""
        self._requested = None
        self._leftover += [fragment for _, fragment in self._receive()]

    def _receive(
        self, count: StepCount | None = None, next_request: Callable[[Worker], Request | None] | None = None
    ) -> Iterator[tuple[int, Fragment]]:
        """Yield pairs of worker index and received fragment; stop all workers on a failure."""
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
        """Count a fragment and write it to the buffer; return False if the fragment is stale."""
        min_version = 0
        if self._max_lag is not None:
            min_version = self._earlier_versions + self._backend.weights.version - self._max_lag
        if not self._received.add(worker, fragment, ended, min_version):
            return False
        if count is not None:
            count.add(fragment, ended)
        if self._writer is not None:
            self._writer.add(fragment)
        return True

    def _started(self) -> WorkerPool:
        if self._pool is None:
            raise WorkerError(_NOT_STARTED)
        if not self._pool.workers:
            raise WorkerError("workers must be running to collect; they have been stopped")
        return self._pool

    def _idle(self, purpose: str) -> WorkerPool:
        self._check_iterated(self._started(), purpose)
        self._finish_collect()
        return self._started()

    def _check_iterated(self, pool: WorkerPool, purpose: str) -> None:
        if self._iterated is not None and pool.busy:
            raise WorkerError(f"an iteration over fragments must be exhausted before workers {purpose}")

    # Resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run between two calls to `collect`, for `load_state_dict`.

        The state of each worker contains the state of the collector (see `Collector.state_dict`), the exploration state
        of the policy, such as the drift of noise, and the state of the global random generators. The state of the run
        also contains the newest published weights and their version, the unfinished episodes, the counters of `stats`,
        and the counters that prevent replacement workers from repeating data. The state excludes `worker_stats` and the
        states of the policy, the hooks and the buffer.

        Returns
        -------
        dict
            Picklable values, arrays and tensors by name. The entry `why_reset` is None if the environments are
            included.

        Raises
        ------
        WorkerError
            If workers have not been started, fragments are pending, the state of a policy cannot be saved, or a worker
            fails and cannot be replaced.

        Examples
        --------
        >>> from samplebatch import RolloutWorkers
        >>> one, other = (
        ...     RolloutWorkers("random", "CartPole-v1", backend="inline", seed=seed)
        ...     for seed in (1, 2)
        ... )
        >>> with one, other:
        ...     _ = one.collect(n_step=100)
        ...     other.load_state_dict(one.state_dict(), allow_pickle=True)
        ...     first, second = one.collect(n_step=100).batch, other.collect(n_step=100).batch
        ...     (first["obs"] == second["obs"]).all()
        np.True_
        """
        with self._one_version:
            self._idle("save their state")
            states = self._exchange([StateRequest()] * len(self._specs))
            pool = self._started()
            version = self._backend.weights.version
            for index, (worker, worker_state) in enumerate(zip(pool.workers, states, strict=True)):
                if "refused" in worker_state:
                    raise WorkerError(f"worker {index} cannot save its state: {worker_state['refused']}")
                worker_state["seed"] = worker.spec.seed
                worker_state["next_unroll_id"] = worker.spec.first_unroll_id + worker.fragments
            return {
                "workers": states,
                "num_envs": self._specs[0].num_envs,
                "failures": pool.earlier_failures + len(pool.failures),
                "version": self._earlier_versions + version,
                "weights": self._backend.weights.latest().value if version else None,
                "received": self._received.state_dict(),
                "rings": None if self._writer is None else self._writer.state_dict(),
                "fragments": [fragment.copy() for fragment in self._leftover],
                "why_reset": next(
                    (why for worker_state in states if (why := worker_state["task"]["collector"]["why_reset"])), None
                ),
            }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Restore the state of workers that had the same arguments as these workers, except for the seed.

        Workers load the newest weights in the state, and later publications continue the version numbering of the
        state.

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
            If the state contains environments and `allow_pickle` is false. The workers are unchanged.
        FormatError
            If the state is incomplete. The workers are unchanged.
        ArgumentError
            If the number of workers or environments, or the class of the collectors, differs from the saved state; or
            if the state contains no weights, but weights have been published. The workers are unchanged.
        WorkerError
            If workers have not been started, fragments are pending, or a worker fails and cannot be replaced, for
            example because the classes of its environments differ from the classes in the saved state.
        """
        missing = [name for name in _NAMES if name not in state]
        if missing:
            raise FormatError(f"the state of workers must have the entry {missing[0]!r}")
        with self._one_version:
            self._idle("load a state")
            actual, expected = (
                (len(workers), envs)
                for workers, envs in ((state["workers"], state["num_envs"]), (self._specs, self._specs[0].num_envs))
            )
            if actual != expected:
                raise ArgumentError(
                    f"state must be of {expected[0]} workers with {expected[1]} environments each, "
                    f"got {actual[0]} with {actual[1]}"
                )
            published = self._backend.weights.version
            if state["weights"] is None and published:
                raise ArgumentError(
                    f"a state without weights must be loaded before weights are published, got version {published}"
                )
            collectors = [worker_state["task"]["collector"] for worker_state in state["workers"]]
            if any(map(collector.has_pickles, collectors)):
                require_permission("the state of workers", allow_pickle=allow_pickle)
            # A starting worker does not read its pipe, so sending a large request to it could block forever.
            for worker_state, collector_state in zip(
                self._exchange([StateRequest()] * len(self._specs)), collectors, strict=True
            ):
                _check_alike(worker_state, collector_state)
            earlier_versions = state["version"] - published - (state["weights"] is not None)
            self._exchange(
                [
                    StateRequest(state=worker_state, earlier_versions=earlier_versions)
                    for worker_state in state["workers"]
                ]
            )
            self._load(state, earlier_versions)

    def _load(self, state: Mapping[str, Any], earlier_versions: int) -> None:
        """Restore the part of a run's state that belongs to the learner's process."""
        pool = self._started()
        for worker, worker_state in zip(pool.workers, state["workers"], strict=True):
            worker.spec = replace(
                worker.spec,
                seed=worker_state["seed"],
                first_unroll_id=worker_state["next_unroll_id"],
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
        self._started().ask(dict(enumerate(requests)))
        self._finish_collect()
        return [dict(worker.answer) for worker in self._started().workers if requests[0].state is None]

    # Stopping

    def request_stop(self) -> None:
        """Request `fragments` to end after the fragments that have been sent completely; callable in signal handlers.

        After the request, a running call to `collect` returns the steps received so far. A stop request during startup
        ends the first call to `fragments` or `collect`.
        """
        self._stop_requested = True
        if self._pool is not None:
            self._pool.request_stop()

    def stop(self) -> list[Fragment]:
        """Stop all workers, and return the complete fragments that were sent, but not received.

        Workers that do not close their environments and exit within two seconds are killed.
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
    choice("backend", name, get_args(BackendName))
    if options.ray_options is not None and name != "ray":
        raise ArgumentError(f"ray_options must be None unless backend is 'ray', got backend {name!r}")
    return _BACKENDS[name](options)


def _check_alike(worker_state: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    own_state = worker_state.get("task", {}).get("collector")
    if own_state is None:
        return
    expected, actual = (
        (collector_state["collector"], collector_state["num_envs"]) for collector_state in (own_state, state)
    )
    if actual != expected:
        raise ArgumentError(
            f"state must be of workers with a {expected[0]} of {expected[1]} environments, got a {actual[0]} of "
            f"{actual[1]}"
        )


_IDS = (names.EPS_ID, names.ENV_ID, names.AGENT_INDEX, names.T, names.UNROLL_ID)
"""Columns that rings do not store: a ring has one environment's steps in order, with episode boundaries."""


class BufferWriter:
    """Writer of worker fragments into a replay buffer: ring k stores the environment with `env_id` k.

    Fragments of one environment arrive in time order. If a fragment does not continue the unfinished episode, because
    the worker was replaced or a fragment was discarded, the newest step of the ring is marked as truncated. The buffer
    therefore contains no episode with a gap.

    - `buffer`: a single-agent buffer with one ring per environment, or a `MultiAgentReplayBuffer`, which links the
      steps of an episode itself.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._next: dict[int, tuple[int, int]] = {}
        """Episode and time of the next step of each environment with an unfinished episode."""

    def state_dict(self) -> dict[int, tuple[int, int]]:
        """Return the expected next step of each ring, for `load_state_dict`; the buffer's state is not included."""
        return dict(self._next)

    def load_state_dict(self, state: Mapping[int, tuple[int, int]]) -> None:
        """Restore the state of a writer; the buffer must contain the rows from the time when the state was saved."""
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
        collector.check_buffer(self._buffer, int(env_id.max()) + 1)
        starts = run_starts(env_id)
        lasts = np.append(starts[1:], len(env_id)) - 1
        done = np.asarray(steps[names.DONES])
        cut = []
        for start, last in zip(starts.tolist(), lasts.tolist(), strict=True):
            env = int(env_id[start])
            expected = self._next.pop(env, None)
            if expected is not None and expected != (int(eps_id[start]), int(t[start])):
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
        buffer = self._buffer
        newest = buffer.unfinished_index()
        rings_of_newest = np.searchsorted(buffer.subbuffer_edges, newest, "right") - 1
        slots = newest[np.isin(rings_of_newest, rings)]
        if len(slots):
            buffer.truncated[slots] = True
            buffer.done[slots] = True


class Rollouts:
    """Adapter that provides a collector's steps to trainers; the collector acts with the learner's policy object.

    - `buffer`: buffer to which steps are written; None for a test collector.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.buffer: Any = getattr(source, "buffer", None)

    def reset(self, *, reset_buffer: bool) -> None:
        """Start new episodes if the source supports resets, and empty the buffer if requested."""
        self._source.reset(reset_buffer=reset_buffer)

    def begin(self, n_step: int | None, n_episode: int | None) -> None:
        """Start collecting in the background if possible; the next `collect` requires the same arguments."""
        return None

    def collect(self, n_step: int | None, n_episode: int | None) -> CollectStats[Any]:
        """Collect into the buffer with the learner's current policy."""
        stats: CollectStats[Any] = self._source.collect(n_step=n_step, n_episode=n_episode)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the collector or workers; the state of the buffer is not included."""
        return dict(self._source.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Restore the state of a collector or workers that had the same arguments as this source."""
        self._source.load_state_dict(state, allow_pickle=allow_pickle)

    def clear(self) -> None:
        """Empty the buffer after an update; unfinished episodes continue."""
        self.buffer.reset(keep_statistics=True)


class WorkerRollouts(Rollouts):
    """Adapter that provides the steps of workers to trainers; workers load the newest weights before they collect.

    - `workers`: started workers with a buffer. If `is_asynchronous` is true, any object with the methods `publish` and
      `receive`, such as `RemoteActors`.
    - `policy`: the learner's policy, a torch module; each worker has a copy.
    - `is_asynchronous`: whether workers continue collecting between two calls to `collect`.
    """

    def __init__(self, workers: Any, policy: Any, *, is_asynchronous: bool = False) -> None:
        super().__init__(workers)
        self._policy, self._is_asynchronous = policy, is_asynchronous
        self._pending_amounts: tuple[int | None, int | None] | None = None
        self._pending_stats: CollectStats[Any] | None = None
        """Report on steps in the buffer that no call to `collect` has returned yet."""

    def reset(self, *, reset_buffer: bool) -> None:
        """Empty the buffer if requested; workers start new episodes only when their processes start."""
        if reset_buffer:
            self.buffer.reset()

    def begin(self, n_step: int | None, n_episode: int | None) -> None:
        """Publish the policy's weights and start collecting; workers queue fragments until `collect` receives them."""
        self._source.publish(self._policy.state_dict())
        self._source.request(n_step, n_episode)
        self._pending_amounts = n_step, n_episode

    def collect(self, n_step: int | None, n_episode: int | None) -> CollectStats[Any]:
        """Receive the steps requested by `begin`, or collect with the newest weights."""
        stats, self._pending_stats = self._pending_stats, None
        if stats is None:
            if self._pending_amounts is None:
                self._source.publish(self._policy.state_dict())
            self._pending_amounts = None
            stats = self._source.receive(n_step) if self._is_asynchronous else super().collect(n_step, n_episode)
        # Copies of the policy computed these steps; the schedules of the policy use its own step count.
        if stats.policies:
            for policy_id, policy_stats in stats.policies.items():
                self._policy[policy_id].note_steps(policy_stats.n_collected_steps)
        else:
            self._policy.note_steps(stats.n_collected_steps)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Wait until steps in flight have been received, and return the state of all workers."""
        if self._pending_amounts is not None:
            self._pending_stats = super().collect(*self._pending_amounts)
            self._pending_amounts = None
        if self._is_asynchronous:
            arrived = self._source.receive()
            if arrived.n_collected_steps:
                self._pending_stats = arrived
        return super().state_dict() | {"held": self._pending_stats}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Restore the state of all workers."""
        super().load_state_dict(state, allow_pickle=allow_pickle)
        self._pending_stats = state["held"]


def make_rollouts(source: Any, policy: Any, *, is_asynchronous: bool = False) -> Rollouts:
    """Wrap a collector or workers as a source of steps for trainers."""
    if isinstance(source, RolloutWorkers) or is_asynchronous:
        return WorkerRollouts(source, policy, is_asynchronous=is_asynchronous)
    return Rollouts(source)

"""RolloutWorkers: processes that step environments and send fragments."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Self

import numpy as np

from samplebatch.arguments import positive, whole
from samplebatch.batch.multi_agent_builder import PolicyMapping
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.env.as_environments import bind_arguments, list_environments
from samplebatch.env.registry import Environment
from samplebatch.env.seeds import as_seeds
from samplebatch.errors import ArgumentError, WorkerError
from samplebatch.names import PolicyID
from samplebatch.policy.action_map import ActionMap
from samplebatch.policy.agents import Noise, check_options
from samplebatch.policy.as_policy import PolicyLike
from samplebatch.policy.source import check_policy, label_weights
from samplebatch.rollout.buffers import RemoteBuffer, as_remote, check_buffer
from samplebatch.rollout.collect_statistics import CollectStats, check_amounts
from samplebatch.rollout.fragments import join_streams
from samplebatch.rollout.postprocessing import Hook, check_hooks
from samplebatch.workers.backend import BackendOptions, Worker
from samplebatch.workers.backends import BackendName, make_backend
from samplebatch.workers.buffer_writer import BufferWriter
from samplebatch.workers.pool import WorkerPool
from samplebatch.workers.ray_options import RayOptions
from samplebatch.workers.resuming import NOT_STARTED, ResumableWorkers
from samplebatch.workers.spec import Request, WorkerSpec, shares
from samplebatch.workers.statistics import Received, StepCount, WorkerStats, weights_version
from samplebatch.workers.task import Fragment


class RolloutWorkers(ResumableWorkers):
    """Processes that step environments, as a policy says or at random, for learners that want several cores.

    Use them as a context manager, which starts and stops the processes. There are two ways to collect:

    - `collect` is synchronous: all workers make their share with the newest weights, and the report has all of it in
      one batch, as the reports of `Collector` and `MultiAgentCollector` have. On-policy learners publish and collect
      in turns.
    - Iteration is asynchronous: workers go on by themselves, and their fragments come in the order in which they
      arrive, a `SampleBatch` each where environments are Gymnasium's, a `MultiAgentBatch` where they are PettingZoo's.

    Rows have the columns of these collectors, and `weights_version`: the number of the weights that a step was made
    with, 0 before the first (see `publish`).

    A fragment lies in shared memory that the worker wrote it to, and that goes back to the worker when the last array
    over it is gone. Where fragments are kept until half of a worker's memory is taken, further ones are copies: keeping
    them never stops a worker.

    A worker that raises, dies or hangs is replaced, `max_restarts` times at most: the other one makes the steps that
    are missing, in environments of the same ids. A fragment that had not been sent as a whole is dropped (see
    `worker_stats`). Beyond that, iteration yields every whole fragment that has been sent, then raises `WorkerError`;
    `collect` raises, and iteration yields the fragments that it had received. Workers ignore Ctrl-C, which is the
    parent's to handle, and end by themselves when their parent is gone, however it ended.

    Parameters
    ----------
    env
        The environment's name, or a function that makes it (see `environment_factory`): of one agent or several, or a
        vector environment; or a list of names and functions, one for each environment of all workers, the first for
        `env_id` 0. They go to other processes by pickle, so functions must be importable.
    policy
        Who decides: `"random"`; anything that `as_policy` takes and that can be pickled, a torch module for instance;
        a function or class that makes one, of nothing or of `observation_space` and `action_space`; or the name of one
        of these, as `module:function`. With several agents, one for all, or a mapping from policy ids to one each.
    buffer
        Where the steps go, too, as they arrive: a buffer of one agent with a ring for each environment of all workers,
        ring k for `env_id` k; or a `MultiAgentReplayBuffer`. An episode that a worker left behind is truncated there.
        Or a `ReplayClient` or `ShardedReplayClient`: each worker writes to the service from its own process, fragments
        that are handed out have rewards, flags and ids alone, and `collect` returns when all steps are in the table.
    n_step
        Environment steps of an iteration: exactly so many in all fragments together, as many in every environment, give
        or take one.
    n_episode
        Episodes of an iteration: exactly so many are brought to their end, as many in every environment, give or take
        one, short and long ones alike. Without either, iteration goes on until it is stopped.
    num_workers
        Processes. There are never more than an iteration has work for.
    envs_per_worker
        Environments that each of them steps, in turns or as one vector environment.
    env_kwargs
        Keyword arguments of the functions or ids that make environments.
    fragment_length
        Environment steps in a fragment of an iteration, of all of a worker's environments together; a worker's last one
        may have fewer. With `n_episode` and several agents a fragment has whole episodes, one of every environment.
    max_lag
        How old the weights of a fragment may be when it is handed out, in publications since; older ones are dropped,
        as asynchronous learners do with experience that is too far off their policy, and are counted in `worker_stats`.
        They count among the steps of an iteration. By default there is no bound.
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
    capacity_bytes
        Size of the memory that a worker's fragments lie in; fragments above half of it arrive in parts.
        By default 64 MiB, less with more than four workers, 8 MiB at least. There is room for weights of this size too,
        and always for those of 16 MiB or the size of the policy. With Ray, half of it is what may be held in the object
        store of one worker's fragments, which arrive whole, and weights have no bound.
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
        If a number is not positive, `max_restarts` or `max_lag` is negative, both numbers of steps and episodes are
        given, there is no such backend, there are `ray_options` for another one than Ray, both a buffer and `hooks`, or
        the buffer has too few rings.
    MissingExtraError
        If the backend is Ray, and it is not installed.

    Examples
    --------
    >>> with RolloutWorkers("CartPole-v1", envs_per_worker=4, backend="inline") as workers:
    ...     stats = workers.collect(n_step=96)
    >>> stats.n_collected_steps, sorted(set(stats.batch["env_id"].tolist()))
    (96, [0, 1, 2, 3, 4, 5, 6, 7])
    >>> with RolloutWorkers("mpe2/simple_spread_v3", n_step=100, num_workers=1, fragment_length=40) as workers:
    ...     [fragment.count for fragment in workers]
    [40, 40, 20]
    """

    def __init__(
        self,
        env: Environment | Sequence[Environment],
        policy: PolicyLike | str | Mapping[PolicyID, PolicyLike | str] = "random",
        buffer: ReplayBuffer | MultiAgentReplayBuffer | RemoteBuffer | None = None,
        *,
        n_step: int | None = None,
        n_episode: int | None = None,
        num_workers: int = 2,
        envs_per_worker: int = 1,
        env_kwargs: Mapping[str, Any] | None = None,
        fragment_length: int = 200,
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
        capacity_bytes: int | None = None,
        ray_options: RayOptions | None = None,
    ) -> None:
        for name, value in (
            ("n_step", n_step),
            ("n_episode", n_episode),
            ("num_workers", num_workers),
            ("envs_per_worker", envs_per_worker),
            ("fragment_length", fragment_length),
            ("capacity_bytes", capacity_bytes),
        ):
            if value is not None:
                whole(name, value, 1)
        positive("stall_timeout_s", stall_timeout_s)
        self._max_restarts = whole("max_restarts", max_restarts)
        self._max_lag = None if max_lag is None else whole("max_lag", max_lag)
        if n_step is not None and n_episode is not None:
            raise ArgumentError(f"one of n_step and n_episode may be given, got {n_step} and {n_episode}")
        hooks = check_hooks(hooks, policy if isinstance(policy, Mapping) else None, buffer=buffer)
        check_options("exploration_noise", exploration_noise, policy)
        check_options("map_action", map_action, policy)
        remote = as_remote(buffer)
        if remote is not None and max_lag is not None:
            raise ArgumentError("max_lag must be left out where workers write to a service: nothing is dropped there")
        check_buffer(buffer, num_workers * envs_per_worker, several=isinstance(buffer, MultiAgentReplayBuffer))
        self._backend = make_backend(
            backend, BackendOptions(num_workers, policy, start_method, capacity_bytes, ray_options)
        )
        environments = list_environments(bind_arguments(env, env_kwargs), num_workers * envs_per_worker)
        check_policy(policy)
        made = self._backend.pack_policy(policy)
        steps, episodes = (shares(amount, num_workers, envs_per_worker) for amount in (n_step, n_episode))
        asked = [Request(*amounts, fragment_length) for amounts in zip(steps, episodes, strict=True)]
        self._stream = [request for request in asked if 0 not in (request.n_step, request.n_episode)]
        seeds = as_seeds(seed)
        self._specs = [
            WorkerSpec(
                index=index,
                envs=environments[index * envs_per_worker : (index + 1) * envs_per_worker],
                policy=made,
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
            for index in range(len(self._stream))
        ]
        self.policy, self.buffer = policy, buffer
        self._writer = None if buffer is None or remote is not None else BufferWriter(buffer)
        self._stall_timeout_s = stall_timeout_s
        self._pool: WorkerPool | None = None
        self._received = Received()
        self._leftover: list[Fragment] = []
        """Fragments of a call of `collect` that did not come to its end."""
        self._requested: tuple[int | None, int | None] | None = None
        self._is_iterating = self._stop_requested = False
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
            If they are larger than there is room for; a larger `capacity_bytes` makes more.
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

    def collect(self, n_step: int | None = None, n_episode: int | None = None) -> CollectStats[Any]:
        """Let all workers collect their share with the newest weights, and report on the steps of all.

        Parameters
        ----------
        n_step
            How many steps of all environments together, as many in each, give or take one. Where environments have one
            agent each, those of a worker are stepped together: up to one step more of each of them.
        n_episode
            How many episodes end: exactly so many, and in every worker those that begin first, so that long ones are as
            likely as short ones.

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
            If workers have not been started, an iteration has not come to its end, or a worker fails that cannot be
            replaced. Iteration yields the fragments that had been received then.
        ColumnMismatchError
            If the columns of different workers cannot be joined.
        """
        began = time.perf_counter()
        count = StepCount()
        found: list[tuple[int, Fragment]] = []
        with self._one_version:
            if self._requested != (n_step, n_episode):
                self.request(n_step, n_episode)
            self._requested = None
            try:
                for one in self._receive(count):
                    found.append(one)
            except BaseException:
                self._leftover += [fragment for _, fragment in found]
                raise
        batch = None if self.buffer is not None else join_streams([one for _, one in sorted(found, key=itemgetter(0))])
        return count.report(time.perf_counter() - began, batch)

    def request(self, n_step: int | None = None, n_episode: int | None = None) -> None:
        """Let all workers begin with their share, and return at once; `collect` for as much receives it.

        Weights that are published in between reach those workers that have not begun. Another amount, there or here,
        leaves these steps to the next iteration. Takes amounts and raises as `collect` does.
        """
        check_amounts(n_step, n_episode)
        with self._one_version:
            pool = self._idle("collect")
            workers, envs = len(self._specs), self._specs[0].num_envs
            amounts = zip(shares(n_step, workers, envs), shares(n_episode, workers, envs), strict=True)
            pool.ask({place: Request(*amount) for place, amount in enumerate(amounts) if 0 not in amount})
            pool.leave()
            self._requested = n_step, n_episode

    def __iter__(self) -> Iterator[Fragment]:
        if self._pool is None:
            raise WorkerError(NOT_STARTED)
        if not self._is_iterating and self._pool.workers:
            self._finish_collect()
            self._pool.ask(dict(enumerate(self._stream)))
            self._is_iterating = True
        while self._leftover:
            yield self._leftover.pop(0)
        for _, fragment in self._receive():
            yield fragment
            del fragment
        self._is_iterating = False

    def _finish_collect(self) -> None:
        """Receive the rest of a call of `collect` that was interrupted, or of a request that nobody collected."""
        self._requested = None
        self._leftover += [fragment for _, fragment in self._receive()]

    def _receive(self, count: StepCount | None = None) -> Iterator[tuple[int, Fragment]]:
        """Yield the fragments of all requests, each with the index of its worker.

        Raises
        ------
        WorkerError
            If a worker fails that cannot be replaced; all workers have been stopped then.
        """
        pool = self._pool
        if pool is None:
            return
        failure: WorkerError | None = None
        try:
            for worker, fragment in pool.receive():
                if self._take(worker, fragment, count):
                    yield worker.spec.index, fragment
                del fragment
        except WorkerError as error:
            failure = error
        if failure is not None or pool.is_stopping():
            yield from self._stop(count)
        if failure is not None:
            raise failure

    def _take(self, worker: Worker, fragment: Fragment, count: StepCount | None) -> bool:
        """Count a fragment, and write it to the buffer; tell whether it is not stale."""
        ended = self._received.add(worker, fragment)
        if self._max_lag is not None:
            lag = self._earlier_versions + self._backend.weights.version - weights_version(fragment)
            if lag > self._max_lag:
                self._received.drop(fragment)
                return False
        self._received.keep(fragment, ended)
        if count is not None:
            count.add(fragment, ended)
        if self._writer is not None:
            self._writer.add(fragment)
        return True

    def request_stop(self) -> None:
        """Let the iterator end soon, after the whole fragments that have been sent; signal handlers may call this.

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
                (worker.spec.index, fragment) for worker, fragment in drained if self._take(worker, fragment, count)
            ]
        finally:
            if pool is not None:
                pool.close()
            self._backend.close()

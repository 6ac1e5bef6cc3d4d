"""RolloutWorkers: processes that step environments and send what they collect."""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, get_args

import numpy as np

from samplebatch.arguments import choice, positive, whole
from samplebatch.batch.multi_agent_builder import PolicyMapping
from samplebatch.env.registry import Environment, environment_factory
from samplebatch.env.seeds import RESTART, seeds_at
from samplebatch.errors import ArgumentError, WorkerError
from samplebatch.names import label_policies
from samplebatch.policy.source import RANDOM, PickledPolicy, check_policy
from samplebatch.rollout.postprocessing import Hook
from samplebatch.transport.broadcast import broadcast
from samplebatch.transport.children import interrupts_blocked
from samplebatch.transport.peers import Poller
from samplebatch.transport.publisher import Publisher
from samplebatch.transport.subscription import Subscription
from samplebatch.workers.counters import WorkerCounters
from samplebatch.workers.exits import WorkerExit
from samplebatch.workers.local_worker import LocalWorker
from samplebatch.workers.spec import WorkerSpec, shares
from samplebatch.workers.summary import RunCount, RunSummary, WorkerFailure
from samplebatch.workers.supervision import GRACE_S, WorkerProcess
from samplebatch.workers.task import Fragment

_LOOK_S = 0.1
"""Seconds after which a request to stop, or a worker that hangs, is noticed at the latest."""

_ALL_ARENAS_NBYTES, _MIN_ARENA_NBYTES, _MAX_ARENA_NBYTES = 256 << 20, 8 << 20, 64 << 20
_WEIGHTS_NBYTES, _NO_WEIGHTS_NBYTES = 16 << 20, 1 << 20

Backend = Literal["process", "inline"]


class RolloutWorkers:
    """Processes that step environments, as a policy says or at random, and send fragments of what they collect.

    Use it as a context manager, which starts and stops the processes, and iterate over it for the fragments, in the
    order in which they arrive: a `SampleBatch` each where environments are Gymnasium's, a `MultiAgentBatch` where they
    are PettingZoo's. They have the columns of `Collector` and `MultiAgentCollector`, and `weights_version`: the number
    of the weights that a step was made with, 0 before the first (see `publish`).

    A fragment lies in shared memory that the worker wrote it to, and that goes back to the worker when the last array
    over it is gone. Where fragments are kept until half of a worker's memory is taken, further ones are copies: keeping
    them never stops a worker.

    A worker that raises, dies or hangs is replaced, `max_restarts` times at most: the other one makes the steps that
    are missing, in environments of the same ids. What had not been sent as a whole is dropped (see `summary`). Beyond
    that the iterator yields every whole fragment that has been sent, then raises `WorkerError`. Workers ignore Ctrl-C,
    which is the parent's to handle, and end by themselves when their parent is gone, however it ended.

    Parameters
    ----------
    env
        The environment's name, or a function that makes it (see `environment_factory`): of one agent or several, or a
        vector environment. It goes to other processes by pickle, so a function must be importable.
    policy
        Who decides: `"random"`; anything that `as_policy` takes and that can be pickled, a torch module for instance;
        a function or class that makes one, of nothing or of `observation_space` and `action_space`; or the name of one
        of these, as `module:function`. With several agents, one for all, or a mapping from policy ids to one each.
    n_step
        Environment steps to collect: exactly so many in all fragments together, as many in every environment, give or
        take one.
    n_episode
        Episodes to collect: exactly so many are brought to their end, as many in every environment, give or take one,
        whatever their length. Without either, workers go on until they are stopped.
    num_workers
        Processes. There are never more than there is work for.
    envs_per_worker
        Environments that each of them steps, in turns or as one vector environment.
    fragment_length
        Environment steps in a fragment, of all of a worker's environments together; a worker's last one may have fewer.
        With `n_episode` and several agents a fragment has whole episodes, one of every environment.
    policy_mapping
        The policy that acts for an agent, by agent id; a function must be importable. By default one policy for each
        kind of agent.
    exploration_noise, map_action
        As for `Collector`, or with several agents for `MultiAgentCollector`; functions must be importable.
    seed
        Seed of the run. What happens in the environment of an `env_id` follows from it alone, `eps_id` and `unroll_id`
        aside, however the environments are spread over workers, as long as a policy decides row by row and draws
        nothing, or is `"random"`, and no worker was replaced. In which order fragments arrive is not determined.
    hooks
        What workers apply to every trajectory, to the part of it that a fragment has: see `postprocess`.
    backend
        `"process"`, or `"inline"` to do the same work in this process, one worker after the other, for debugging.
    start_method
        How processes start: `"spawn"`, `"forkserver"` or `"fork"`.
    stall_timeout_s
        Seconds without a step or fragment after which a worker is taken to hang. Time in which nobody asks for
        fragments does not count; and a worker has a minute in any case to start and make its environments.
    max_restarts
        How many workers may be replaced, all together.
    capacity_bytes
        Size of the memory that a worker's fragments lie in; fragments above half of it arrive in parts.
        By default 64 MiB, less with more than four workers, 8 MiB at least. There is room for weights of this size too,
        and always for those of 16 MiB or the size of the policy.

    Raises
    ------
    EnvironmentSpecError
        If there is no such environment, or it cannot be sent to another process.
    PolicySpecError
        If there is no such policy, or it cannot be sent to another process.
    ValueError
        If a number is not positive, `max_restarts` is negative, both numbers of steps and episodes are given, or there
        is no such backend.

    Examples
    --------
    >>> with RolloutWorkers("mpe2/simple_spread_v3", n_step=100, num_workers=1, fragment_length=40) as workers:
    ...     [fragment.count for fragment in workers]
    [40, 40, 20]
    >>> with RolloutWorkers("CartPole-v1", n_step=100, envs_per_worker=4, backend="inline") as workers:
    ...     [(len(steps), set(steps["env_id"].tolist())) for steps in workers]
    [(52, {0, 1, 2, 3}), (48, {4, 5, 6, 7})]
    """

    def __init__(
        self,
        env: Environment,
        policy: Any = RANDOM,
        *,
        n_step: int | None = None,
        n_episode: int | None = None,
        num_workers: int = 2,
        envs_per_worker: int = 1,
        fragment_length: int = 200,
        policy_mapping: PolicyMapping | None = None,
        exploration_noise: Any = False,
        map_action: Any = None,
        hooks: Sequence[Hook] = (),
        seed: int | None = None,
        backend: Backend = "process",
        start_method: str = "spawn",
        stall_timeout_s: float = 300.0,
        max_restarts: int = 0,
        capacity_bytes: int | None = None,
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
        whole("max_restarts", max_restarts)
        if n_step is not None and n_episode is not None:
            raise ArgumentError(f"one of n_step and n_episode may be given, got {n_step} and {n_episode}")
        choice("backend", backend, get_args(Backend))
        environment_factory(env)
        check_policy(policy)
        self._context = multiprocessing.get_context(start_method)
        self._backend = backend
        self._stall_timeout_s = stall_timeout_s
        self._restarts_left = max_restarts
        self._seed = np.random.SeedSequence(seed)
        made: Callable[[], Any] = PickledPolicy(policy) if backend == "process" else partial(copy.deepcopy, policy)
        steps = shares(n_step, num_workers, envs_per_worker)
        ends = shares(n_episode, num_workers, envs_per_worker)
        self._specs = [
            WorkerSpec(
                index,
                env,
                made,
                envs_per_worker,
                steps[index],
                ends[index],
                fragment_length,
                policy_mapping,
                exploration_noise,
                map_action,
                tuple(hooks),
                self._seed,
                index << 32,
            )
            for index in range(num_workers)
            if steps[index] != 0 and ends[index] != 0
        ]
        least = max(_MIN_ARENA_NBYTES, min(_MAX_ARENA_NBYTES, _ALL_ARENAS_NBYTES // num_workers))
        self._capacity_bytes = least if capacity_bytes is None else capacity_bytes
        self._labels = label_policies(policy) if isinstance(policy, Mapping) else {}
        self._weights_nbytes = max(_weights_nbytes(policy), capacity_bytes or 0)
        self._ends: tuple[Publisher, Subscription] | None = None
        self._board: WorkerCounters | None = None
        self._workers: list[WorkerProcess | LocalWorker] = []
        self._poller: Poller | None = None
        self._watched: dict[int, WorkerProcess] = {}
        self._count = RunCount()
        self._entered = False
        self._stop_requested = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, in their order; empty unless processes have been started."""
        return [worker.pid for worker in self._workers if isinstance(worker, WorkerProcess)]

    @property
    def summary(self) -> RunSummary:
        """The counts of the run so far."""
        return self._count.summary(self._workers)

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Publish weights, which every worker gives to its policy before its next fragment.

        The policy gets them by its method `load_state_dict`, as torch modules have, or `set_weights`. Weights that
        were not asked for before there are newer ones are never loaded.

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
        if self._labels and isinstance(weights, Mapping):
            weights = {self._labels.get(policy, policy): own for policy, own in weights.items()}
        return self._broadcast()[0].publish(weights)

    def _broadcast(self) -> tuple[Publisher, Subscription]:
        if self._ends is None:
            self._ends = broadcast(self._weights_nbytes)
        return self._ends

    def __enter__(self) -> Self:
        self._entered = True
        try:
            self._poller = Poller()
            self._board = WorkerCounters.create(1 + max(spec.index for spec in self._specs))
            for spec in self._specs:
                self._workers.append(self._start(spec))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, spec: WorkerSpec) -> WorkerProcess | LocalWorker:
        _, subscription = self._broadcast()
        if self._backend == "inline":
            return LocalWorker(spec, subscription)
        assert self._board is not None
        with interrupts_blocked():
            worker = WorkerProcess(spec, self._context, self._board, subscription, self._capacity_bytes)
        for descriptor in worker.waits_on:
            self._watched[descriptor] = worker
            if self._poller is not None:
                self._poller.register(descriptor)
        return worker

    def __iter__(self) -> Iterator[Fragment]:
        if not self._entered:
            raise WorkerError("workers must be started before they can send anything; use them in a with statement")
        failure: WorkerError | None = None
        while failure is None and not self._is_stopping() and self._running():
            ready = self._ready()
            for worker in self._running():
                if self._is_stopping():
                    break
                if worker not in ready:
                    worker.check_stall(self._stall_timeout_s)
                    continue
                try:
                    fragment = worker.receive()
                except WorkerExit as end:
                    failure = self._note_exit(worker, end)
                    if failure is not None:
                        break
                    continue
                if worker.finished:
                    self._unwatch(worker)
                if fragment is not None:
                    self._count.add(worker, fragment)
                    yield from self._hand_out(fragment)
                    del fragment
        if self._running() or failure is not None:
            yield from self.stop()
        if failure is not None:
            raise failure

    def _is_stopping(self) -> bool:
        return self._stop_requested

    def _hand_out(self, fragment: Fragment) -> Iterator[Fragment]:
        """Yield a fragment; for how long it is looked at is no worker's fault."""
        before = time.monotonic()
        yield fragment
        away_s = time.monotonic() - before
        for worker in self._workers:
            worker.extend_deadline(away_s)

    def _running(self) -> list[WorkerProcess | LocalWorker]:
        return [worker for worker in self._workers if not worker.finished]

    def _ready(self) -> Sequence[WorkerProcess | LocalWorker]:
        """Wait for workers that have something to say."""
        if self._backend == "inline" or self._poller is None:
            return self._running()
        return [self._watched[descriptor] for descriptor in self._poller.poll(_LOOK_S)]

    def _unwatch(self, worker: WorkerProcess | LocalWorker) -> None:
        for descriptor in [own for own, other in self._watched.items() if other is worker]:
            del self._watched[descriptor]
            if self._poller is not None:
                self._poller.unregister(descriptor)

    def _note_exit(self, worker: WorkerProcess | LocalWorker, end: WorkerExit) -> WorkerError | None:
        """Note the failure of a worker, and replace it; if that cannot be, return the error to raise."""
        self._unwatch(worker)
        spec = worker.spec
        steps_left = None if spec.n_step is None else spec.n_step - worker.env_steps
        episodes_left = None if spec.n_episode is None else spec.n_episode - worker.episodes
        if (steps_left is not None and steps_left <= 0) or (episodes_left is not None and episodes_left <= 0):
            # It died when it had nothing left to do.
            worker.finished = True
            return None
        replaced = self._restarts_left > 0
        incident = WorkerFailure(
            index=spec.index,
            pid=worker.pid,
            how=end.how + (f": {end.why}" if end.why else ""),
            env_steps=worker.env_steps,
            lost_steps=max(0, worker.made - worker.env_steps),
            env_ids=spec.env_ids,
            replaced=replaced,
        )
        self._count.lose(incident, worker)
        if not replaced:
            worker.finished = True
            error = WorkerError(_word_exit(worker, end))
            if end.details:
                error.add_note(end.details)
            error.__cause__ = end.__cause__
            return error
        self._restarts_left -= 1
        worker.end()
        self._workers[self._workers.index(worker)] = self._start(
            replace(
                spec,
                n_step=steps_left,
                n_episode=episodes_left,
                seed=seeds_at(self._seed, RESTART, len(self._count.incidents)),
                first_unroll_id=spec.first_unroll_id + worker.fragments,
            )
        )
        return None

    def request_stop(self) -> None:
        """Let the iterator end soon, after the whole fragments that have been sent; signal handlers may call this."""
        self._stop_requested = True

    def stop(self) -> list[Fragment]:
        """End all workers, and return the whole fragments that they had sent and nobody has received.

        Workers have two seconds to close their environments; after that they are killed.
        """
        workers, running = self._workers, self._running()
        fragments: list[Fragment] = []
        try:
            for worker in running:
                worker.terminate()
            deadline = time.monotonic() + GRACE_S
            for worker in running:
                for fragment in worker.drain(deadline):
                    self._count.add(worker, fragment)
                    fragments.append(fragment)
        finally:
            self._count.keep(workers)
            self._workers = []
            for worker in workers:
                worker.end()
            self._watched.clear()
            for own in (self._poller, self._board, *(self._ends or ())):
                if own is not None:
                    own.close()
            self._poller = self._board = None
        return fragments


def _word_exit(worker: WorkerProcess | LocalWorker, end: WorkerExit) -> str:
    spec = worker.spec
    sent = f"{worker.env_steps}{'' if spec.n_step is None else f' of {spec.n_step}'} steps"
    if spec.n_episode is not None:
        sent += f" and {worker.episodes} of {spec.n_episode} episodes"
    why = f": {end.why}" if end.why else ""
    return f"worker {spec.index} (process {worker.pid}) {end.how} after sending {sent}{why}"


def _weights_nbytes(policy: Any) -> int:
    """Tell how much room weights need that are like the policy's own, with some for their description."""
    policies = list(policy.values()) if isinstance(policy, Mapping) else [policy]
    if all(isinstance(one, str) and one == RANDOM for one in policies):
        return _NO_WEIGHTS_NBYTES
    states = [one.state_dict() for one in policies if hasattr(one, "state_dict") and not isinstance(one, type)]
    known = sum(int(value.nbytes) for state in states for value in state.values() if hasattr(value, "nbytes"))
    return max(_WEIGHTS_NBYTES, known + known // 8 + _NO_WEIGHTS_NBYTES)

"""RayBackend: workers as actors on a cluster of Ray, and the calls that each has under way."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from samplebatch.column.unpickling import unpickle
from samplebatch.errors import ArgumentError, EnvironmentSpecError, require
from samplebatch.policy.source import PickledPolicy
from samplebatch.workers.backend import Backend, BackendOptions, Worker
from samplebatch.workers.exits import WorkerExit
from samplebatch.workers.ray_actor import RayCollector, Report
from samplebatch.workers.ray_cluster import check_tokens, connect, word_unstarted
from samplebatch.workers.ray_objects import StoredFragments
from samplebatch.workers.ray_options import RayOptions
from samplebatch.workers.ray_weights import StoredWeights
from samplebatch.workers.spec import Request, StateRequest, WorkerSpec
from samplebatch.workers.task import Fragment

_LENT = 2
"""Which part of the node's object store may be the memory of all workers' fragments, if nobody says how large it is."""

_REPORT_S = 0.25
"""Seconds between two questions how far an actor is that has not sent a fragment for as long."""

_CONTROL = "control"
"""The group of an actor's threads that answers while another collects."""


class RayBackend(Backend):
    """Actors on a cluster of Ray, with fragments in its object store; see `Backend`.

    A cluster that it has connected to, or started, is left connected: arrays lie in the store.
    """

    def __init__(self, options: BackendOptions) -> None:
        self._ray = require("ray", "ray")
        given = RayOptions() if options.ray_options is None else options.ray_options
        if not isinstance(given, RayOptions):
            raise ArgumentError(f"ray_options must be RayOptions, got a {type(given).__name__}")
        self._given = given
        self._options = options
        self._capacity_bytes = options.fragments_nbytes
        self._connect = partial(connect, given.address)
        self._weights = StoredWeights(self._connect)

    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        """Pickle a policy, by value where its module is the script that runs."""
        return PickledPolicy(policy, self._ray.cloudpickle.dumps)

    @property
    def weights(self) -> StoredWeights:
        """The newest weights."""
        return self._weights

    def open(self, workers: int) -> None:
        """Connect to the cluster.

        Raises
        ------
        ArgumentError
            If this process is connected to another one, or has a token where the cluster has none.
        """
        self._weights.check_open()
        ray = self._connect()
        check_tokens(ray.get_runtime_context().gcs_address)
        if self._options.capacity_bytes is None:
            here = ray.get_runtime_context().get_node_id()
            stores = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["NodeID"] == here]
            self._capacity_bytes = min(self._capacity_bytes, int(max(stores)) // (_LENT * self._options.num_workers))

    def start(self, spec: WorkerSpec) -> Worker:
        """Start an actor.

        Raises
        ------
        EnvironmentSpecError
            If an environment cannot be pickled.
        """
        try:
            pickled = self._ray.cloudpickle.dumps(spec)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvironmentSpecError(
                f"env, policy_mapping and hooks go to other processes, and must be names or functions that can "
                f"be pickled: {error}"
            ) from error
        return RayWorker(spec, pickled, self._given, self._weights, self._capacity_bytes)

    def wait(self, busy: Sequence[Worker], timeout_s: float) -> Sequence[Worker]:
        """Wait until the next fragment of an actor lies in the store of this node, or an actor is dead."""
        heads = {reference: worker for worker in busy for reference in worker.waits_on}
        references = list(heads)
        ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(references, timeout=timeout_s)
        return [heads[reference] for reference in ready]

    def close(self) -> None:
        """Let go of the weights."""
        self._weights.close()


@cache
def _actor_class() -> Any:
    """Make the class of actors, which Ray sends to a cluster once. It replaces none, and repeats no call."""
    options = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {_CONTROL: 1}}
    return require("ray", "ray").remote(**options)(RayCollector)


class _Call(NamedTuple):
    """References to the two parts of an answer: the report, which goes past the object store, and its body."""

    report: Any
    body: Any


class RayWorker(Worker):
    """An actor of Ray, and its calls under way; see `Worker` for its attributes.

    Parameters
    ----------
    spec
        The environments and the policy.
    pickled
        The same, as the actor gets it.
    options
        Resources and placement of the actor, and how many calls are under way.
    weights
        The newest weights, whose reference goes with each call.
    capacity_bytes
        See `StoredFragments`.
    """

    def __init__(
        self, spec: WorkerSpec, pickled: bytes, options: RayOptions, weights: StoredWeights, capacity_bytes: int
    ) -> None:
        super().__init__(spec)
        self._ray = require("ray", "ray")
        self._actor = _actor_class().options(**options.for_actor()).remote(pickled, max(1, int(options.num_cpus)))
        self._options = options
        self._weights = weights
        self._version = 0
        """The version of the weights that the actor has been told of."""
        self._stored = StoredFragments(capacity_bytes)
        self._calls: deque[_Call] = deque()
        self._number = 0
        self._told = b""
        self._newest = Report()
        self._question: Any = None
        self._asked_at = time.monotonic()
        self._closed: Any = None
        self._hang: WorkerExit | None = None

    @property
    def pid(self) -> int:
        """The actor's process id on its node; 0 until it has answered."""
        return self._newest.pid

    @property
    def waits_on(self) -> list[Any]:
        """The reference that is ready when there is something to receive."""
        return [call.body for call in list(self._calls)[:1]]

    @property
    def num_envs(self) -> int:
        """How many environments it has told of; 0 until they are made."""
        return self._newest.num_envs

    @property
    def answer(self) -> Any:
        """The state that it was asked for last; see `Worker.answer`."""
        return unpickle([self._told], f"the state of worker {self.spec.index}", allow_pickle=True)[0]

    @property
    def lost_steps(self) -> int:
        """Environment steps that it has told of, and that were not received."""
        return max(0, self._newest.made - self.total_steps)

    @property
    def sent_steps(self) -> int:
        """Environment steps in the fragments that it has sent."""
        self._look()
        return max(self._newest.sent, self.total_steps)

    @property
    def waiting(self) -> int:
        """Fragments that lie in the object store and were not received yet."""
        self._look()
        return max(0, self._newest.messages - self.fragments)

    def ask(self, request: Request) -> None:
        """Send a request, in the first of the calls for its fragments."""
        super().ask(request)
        self._number += 1
        self._calls.clear()
        self._call(pickle.dumps(request))
        if not isinstance(request, StateRequest):
            while len(self._calls) < self._options.in_flight:
                self._call()

    def _call(self, request: bytes | None = None) -> None:
        version, references = self._weights.newest
        news = references if version > self._version else []
        self._version = version
        answer = self._actor.next.options(num_returns=2).remote(self._number, request, version, news)
        self._calls.append(_Call(*answer))

    def receive(self, timeout_s: float = 0.0) -> Fragment | None:
        """Receive the next fragment, where it lies in the object store; see `Worker.receive`."""
        if not self._calls or not self._ray.wait(self.waits_on, timeout=timeout_s)[0]:
            return None
        try:
            report, body = self._ray.get(list(self._calls[0]))
        except self._ray.exceptions.RayError as error:
            raise self._exit(error) from None
        self._heard_at = time.monotonic()
        self._note(report)
        if report.kind == "failed":
            raise WorkerExit("failed", report.why, report.details)
        self._calls.popleft()
        self.fragments += 1
        if report.kind == "fragment":
            if self._closed is None:
                self._call()
            return self._stored.open(body)
        self._calls.clear()
        self._told = body or b""
        self.request = None
        return None

    def _exit(self, error: Exception) -> WorkerExit:
        """Find out how the actor came to its end."""
        self._look()
        errors = self._ray.exceptions
        if self._hang is not None:
            return self._hang
        if isinstance(error, errors.ObjectLostError) or self._has_lost_node():
            return WorkerExit("died with its node", details=str(error))
        if isinstance(error, errors.ActorUnavailableError):
            return WorkerExit("cannot be reached", details=str(error))
        if isinstance(error, errors.RayActorError):
            why = word_unstarted(str(error))
            return WorkerExit("died" if why is None else "did not start", why or "", str(error))
        return WorkerExit("failed", str(error).partition("\n")[0], str(error))

    def _has_lost_node(self) -> bool:
        return any(node["NodeID"] == self._newest.node and not node["Alive"] for node in self._ray.nodes())

    def check_stall(self, stall_timeout_s: float) -> None:
        """Ask how far the actor is, and kill it if it has done nothing for too long; see `Worker.check_stall`."""
        self._ask_progress()
        hang = self._find_hang(
            (self.num_envs, self._newest.made), stall_timeout_s, has_sent=bool(self.total_steps or self._newest.sent)
        )
        if hang is not None and self._hang is None:
            if not self._newest.pid:
                hang = WorkerExit("did not start", "no node may have the resources of a worker free")
            self._hang = hang
            self._kill()

    def _ask_progress(self) -> None:
        if self._question is not None and self._ray.wait([self._question], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError):
                self._note(self._ray.get(self._question))
            self._question = None
        now = time.monotonic()
        if self._question is None and now - max(self._asked_at, self._heard_at) > _REPORT_S:
            self._asked_at = now
            self._question = self._actor.report.options(concurrency_group=_CONTROL).remote()

    def _look(self) -> None:
        """Read the reports that have come of fragments that have not been received."""
        references = [call.report for call in self._calls]
        if references and self._ray.is_initialized():
            for reference in self._ray.wait(references, num_returns=len(references), timeout=0)[0]:
                with suppress(self._ray.exceptions.RayError):
                    self._note(self._ray.get(reference))

    def _note(self, report: Report) -> None:
        """Keep the newest report: steps that were left out let the number of those made fall with a fragment."""
        newest = self._newest
        if (report.messages, report.made, report.num_envs) >= (newest.messages, newest.made, newest.num_envs):
            self._newest = report

    def terminate(self) -> None:
        """Ask the actor to give up its fragment and to close its environments."""
        # A call would start another Ray where the caller has shut this one down.
        if self._ray.is_initialized():
            self._actor.stop.options(concurrency_group=_CONTROL).remote()
            self._closed = self._actor.close.remote()

    def drain(self, deadline: float) -> Iterator[Fragment]:
        """Receive the last fragments of an actor that is being stopped, and wait for its environments to be closed."""
        if self._closed is None:
            return
        with suppress(WorkerExit):
            while self.request is not None and (left_s := deadline - time.monotonic()) > 0:
                fragment = self.receive(min(0.1, left_s))
                if fragment is not None:
                    yield fragment
        self._ray.wait([self._closed], timeout=max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Kill the actor; fragments that were received stay."""
        self._kill()
        self._calls.clear()
        self._question = self._closed = None

    def _kill(self) -> None:
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._actor, no_restart=True)

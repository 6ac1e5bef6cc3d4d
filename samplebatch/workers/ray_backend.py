"""Backend that runs workers as Ray actors: the actor class, and the actors' handles in the learner's process."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import ArgumentError, ChannelClosedError, EnvironmentSpecError, require
from samplebatch.policy.source import PickledPolicy
from samplebatch.rollout.statistics import EpisodeStatistics
from samplebatch.transport.broadcast import Publication, batch_to_weights, weights_to_batch
from samplebatch.transport.encode import Encoder
from samplebatch.workers import backend
from samplebatch.workers.task import (
    Collected,
    Fragment,
    Request,
    StateRequest,
    Task,
    WorkerSpec,
    exchange_state,
    start_task,
)

Packed = tuple[bytes, list[Any]]
"""A pickle and its out-of-band buffers, which Ray copies into its store once and maps on reading."""


Body = tuple[Packed, EpisodeStatistics]
"""A packed fragment and the statistics of the episodes that it ends."""


def pack(value: Any) -> Packed:
    """Pickle a value for Ray's object store; the value's arrays become out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def unpack(packed: Packed, buffers: Sequence[Any] | None = None) -> Any:
    """Unpickle a value from Ray's store; arrays are views of `buffers`, or writable copies if `buffers` is None.

    >>> import numpy as np
    >>> value = unpack(pack({"bias": np.zeros(2)}))
    >>> value["bias"] += 1
    >>> value
    {'bias': array([1., 1.])}
    """
    pickled, stored = packed
    return pickle.loads(pickled, buffers=[bytearray(buffer) for buffer in stored] if buffers is None else buffers)


Kind = Literal["progress", "fragment", "state", "end", "failed"]


@dataclass(frozen=True)
class Report:
    """Progress report that is part of every reply of an actor, and is small enough to bypass the object store.

    - `kind`: kind of the reply.
    - `pid`, `node`: process id of the actor, and id of its node.
    - `num_envs`: number of environments; 0 until they have been created.
    - `messages`, `sent`, `made`: numbers of replies to active requests, of environment steps in these replies, and of
      completed environment steps that were sent or may still be sent.
    - `why`, `details`: reason and traceback of a failure.
    """

    kind: Kind = "progress"
    pid: int = 0
    node: str = ""
    num_envs: int = 0
    messages: int = 0
    sent: int = 0
    made: int = 0
    why: str = ""
    details: str = ""


class RayCollector:
    """Ray actor that executes a worker's requests; `RayWorker` limits the number of the actor's calls in flight.

    The methods `report` and `stop` run in a separate thread, so they can run while `next` collects a fragment.

    - `spec`: pickled `WorkerSpec`.
    - `threads`: number of torch threads.
    """

    def __init__(self, spec: bytes, threads: int) -> None:
        self._spec = spec
        self._threads = threads
        self._weights = _NewestWeights()
        self._task: Task | None = None
        self._number = 0
        self._state_request: StateRequest | None = None
        self._messages = self._sent = self._num_steps = 0
        self._is_stopping = False
        self._failure: tuple[str, str] | None = None
        self._node = str(require("ray", "ray").get_runtime_context().get_node_id())

    def next(
        self, number: int, request: bytes | None, version: int, weights: list[Any]
    ) -> tuple[Report, Body | bytes | None]:
        """Collect the next fragment of a request.

        - `number`: number of the request; after the last fragment of the request, the reply is of kind `end`.
        - `request`: pickled request in the first call for a request; None in later calls.
        - `version`, `weights`: version of the newest weights, and a list with the object reference of these weights.
          The list is empty if the reference has already been sent.
        """
        if self._failure is None:
            try:
                return self._answer(number, request, version, weights)
            except _Stop:
                return self.report("end"), None
            except Exception as error:
                self._failure = backend.word_failure(error), traceback.format_exc()
        return self.report("failed"), None

    def _answer(
        self, number: int, request: bytes | None, version: int, weights: list[Any]
    ) -> tuple[Report, Body | bytes | None]:
        self._weights.offer(version, weights)
        if request is not None:
            self._begin(number, request)
        if number != self._number or self._is_stopping:
            return self.report("end"), None
        task = self._require_task()
        if self._state_request is not None:
            body: Body | bytes | None = exchange_state(task, self._state_request)
            self._state_request, self._number = None, 0
            return self._reply("state"), body
        fragment = task.next()
        if fragment is None:
            self._number = 0
            return self._reply("end"), None
        self._sent += fragment.env_steps()
        # Omitted steps are not lost.
        self._num_steps = self._sent
        return self._reply("fragment"), (pack(fragment), task.count_ended(fragment))

    def _reply(self, kind: Kind) -> Report:
        self._messages += 1
        return self.report(kind)

    def _begin(self, number: int, pickled: bytes) -> None:
        (request,) = unpickle([pickled], "a request", allow_pickle=True)
        self._number = number
        if isinstance(request, StateRequest):
            self._state_request = request
        else:
            self._require_task().begin(request)

    def _require_task(self) -> Task:
        if self._task is None:
            (spec,) = unpickle([self._spec], "the specification of a worker", allow_pickle=True)
            self._task = start_task(spec, self._weights, self._count_steps, threads=self._threads)
        return self._task

    def _count_steps(self, steps: int) -> None:
        self._num_steps += steps
        if self._is_stopping:
            raise _Stop

    def report(self, kind: Kind = "progress") -> Report:
        """Return the progress of the actor."""
        return Report(
            kind,
            os.getpid(),
            self._node,
            0 if self._task is None else self._task.num_envs,
            self._messages,
            self._sent,
            self._num_steps,
            *(self._failure or ()),
        )

    def stop(self) -> None:
        """Stop collecting, and abandon the current fragment at the next environment step."""
        self._is_stopping = True

    def close(self) -> None:
        """Close the environments."""
        if self._task is not None:
            with contextlib.suppress(Exception):
                self._task.close()


class _NewestWeights:
    """Reference to the newest weights in the object store; `latest` fetches the weights."""

    def __init__(self) -> None:
        self.version = 0
        self._reference: Any = None

    def offer(self, version: int, references: list[Any]) -> None:
        if references:
            self.version, (self._reference,) = version, references

    def latest(self) -> Publication:
        return read_weights(require("ray", "ray"), self.version, self._reference)


class _Stop(BaseException):
    """Exception that an environment step raises if the current fragment is no longer requested."""


def read_weights(ray: Any, version: int, reference: Any) -> Publication:
    """Copy weights from Ray's object store; see `StoredWeights`."""
    return Publication(version, batch_to_weights(unpack(ray.get(reference))))


@dataclass(frozen=True)
class RayOptions:
    """Ray options of `RolloutWorkers`: cluster, resources and placement of each worker, and requests in flight.

    Attributes
    ----------
    address
        Address `host:port` of a running cluster that includes this machine as a node; `"auto"` for the running cluster
        of this machine; or `"local"` for a cluster that this process starts or has started. The default is the cluster
        to which this process is connected, the cluster in `RAY_ADDRESS`, or the cluster that was started last on this
        machine, in this order; if none exists, a new cluster is started.
    num_cpus, num_gpus
        Number of CPUs and GPUs per worker. In each worker, torch uses one thread per CPU of the worker, and at least
        one thread.
    memory
        Memory in bytes that Ray reserves for each worker; None disables the reservation.
    resources
        Amounts of further Ray resources per worker, by resource name.
    scheduling_strategy
        Ray's scheduling strategy: `"DEFAULT"`, `"SPREAD"`, a `PlacementGroupSchedulingStrategy`, a
        `NodeAffinitySchedulingStrategy` or a `NodeLabelSchedulingStrategy`.
    runtime_env
        Ray runtime environment of each worker process, such as `{"env_vars": {...}}`.
    in_flight
        Maximum number of fragments per worker that have been requested, but not received: one fragment is being
        collected while the others wait in the object store.

    Raises
    ------
    ArgumentError
        If a number is negative, `in_flight` is not a positive integer, or the address is a Ray Client address, because
        Ray Client does not share memory with the cluster.

    Examples
    --------
    >>> RayOptions(num_cpus=2, scheduling_strategy="SPREAD").for_actor()
    {'num_cpus': 2, 'num_gpus': 0, 'scheduling_strategy': 'SPREAD'}
    """

    address: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    memory: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    scheduling_strategy: Any = None
    runtime_env: Mapping[str, Any] | None = None
    in_flight: int = 2

    def __post_init__(self) -> None:
        if self.address is not None and self.address.startswith("ray://"):
            raise ArgumentError(
                "address must be of a cluster with this machine as a node, as host:port or 'auto', got Ray "
                f"Client: {self.address!r}"
            )
        amounts = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
                raise ArgumentError(f"{name} must be a number from 0, got {amount!r}")
        if self.memory is not None:
            whole("memory", self.memory, 1)
        whole("in_flight", self.in_flight, 1)

    def describe_needs(self) -> str:
        """Format the resources that a worker requires.

        >>> RayOptions(num_gpus=0.5, resources={"seat": 1}).describe_needs()
        '1 CPU, 0.5 GPU, 1 seat'
        """
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": self.memory or 0, **self.resources}
        return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount) or "no resources"

    def for_actor(self) -> dict[str, Any]:
        """Return the options of a Ray actor."""
        optional = {
            "memory": self.memory,
            "resources": dict(self.resources) or None,
            "scheduling_strategy": self.scheduling_strategy,
            "runtime_env": None if self.runtime_env is None else dict(self.runtime_env),
        }
        specified = {name: value for name, value in optional.items() if value is not None}
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **specified}


_LENT = 2
"""Divisor of the node's object store: the default memory of all workers' fragments is 1 / `_LENT` of it."""

_REPORT_S = 0.25
"""Interval of progress requests to actors that have not sent a fragment."""

_CONTROL = "control"
"""Concurrency group of an actor that answers while another thread collects."""


class RayBackend(backend.Backend):
    """Backend that starts actors on a Ray cluster and transfers fragments through the cluster's object store.

    `close` does not close the connection to the cluster, because arrays may reference the cluster's object store.
    """

    def __init__(self, options: backend.BackendOptions) -> None:
        self._ray = require("ray", "ray")
        ray_options = RayOptions() if options.ray_options is None else options.ray_options
        if not isinstance(ray_options, RayOptions):
            raise ArgumentError(f"ray_options must be RayOptions, got a {type(ray_options).__name__}")
        self._ray_options = ray_options
        self._options = options
        self._capacity_nbytes = options.fragments_nbytes
        self._connect = partial(connect, ray_options.address)
        self._weights = StoredWeights(self._connect)

    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        return PickledPolicy(policy, self._ray.cloudpickle.dumps)

    @property
    def weights(self) -> StoredWeights:
        return self._weights

    def open(self, workers: int) -> None:
        self._weights.check_open()
        ray = self._connect()
        check_tokens(ray.get_runtime_context().gcs_address)
        if self._options.capacity_nbytes is None:
            node_id = ray.get_runtime_context().get_node_id()
            stores = [
                node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["NodeID"] == node_id
            ]
            self._capacity_nbytes = min(self._capacity_nbytes, int(max(stores)) // (_LENT * self._options.num_workers))

    def start(self, spec: WorkerSpec) -> backend.Worker:
        try:
            pickled = self._ray.cloudpickle.dumps(spec)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise EnvironmentSpecError(
                f"env, policy_mapping and hooks must be names or picklable functions, because they are sent to other "
                f"processes: {error}"
            ) from error
        return RayWorker(spec, pickled, self._ray_options, self._weights, self._capacity_nbytes)

    def wait(self, busy: Sequence[backend.Worker], timeout_s: float) -> Sequence[backend.Worker]:
        heads = {reference: worker for worker in busy for reference in worker.waits_on}
        references = list(heads)
        completed, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        if not completed:
            completed, _ = self._ray.wait(references, timeout=timeout_s)
        return [heads[reference] for reference in completed]

    def close(self) -> None:
        self._weights.close()


@cache
def _actor_class() -> Any:
    """Create the actor class with restarts and retries disabled; cached, so that Ray sends the class only once."""
    options = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {_CONTROL: 1}}
    return require("ray", "ray").remote(**options)(RayCollector)


class _Call(NamedTuple):
    """Object references to the two parts of a reply: the report, which bypasses the object store, and the body."""

    report: Any
    body: Any


class RayWorker(backend.Worker):
    """Handle of a Ray actor, with the actor's calls in flight; `Worker` describes the attributes."""

    def __init__(
        self, spec: WorkerSpec, pickled: bytes, options: RayOptions, weights: StoredWeights, capacity_nbytes: int
    ) -> None:
        super().__init__(spec)
        self._ray = require("ray", "ray")
        self._actor = _actor_class().options(**options.for_actor()).remote(pickled, max(1, int(options.num_cpus)))
        self._options = options
        self._weights = weights
        self._version = 0
        """Newest version of the weights that was sent to the actor."""
        self._stored = StoredFragments(capacity_nbytes)
        self._calls: deque[_Call] = deque()
        self._number = 0
        self._state_bytes = b""
        self._newest = Report()
        self._question: Any = None
        self._asked_at = time.monotonic()
        self._closed: Any = None
        self._hang: backend.WorkerExit | None = None

    @property
    def pid(self) -> int:
        return self._newest.pid

    @property
    def is_placed(self) -> bool:
        if not self._newest.pid:
            self._ask_progress()
        return bool(self._newest.pid)

    @property
    def waits_on(self) -> list[Any]:
        return [call.body for call in list(self._calls)[:1]]

    @property
    def num_envs(self) -> int:
        return self._newest.num_envs

    @property
    def answer(self) -> Any:
        return unpickle([self._state_bytes], f"the state of worker {self.spec.index}", allow_pickle=True)[0]

    @property
    def lost_steps(self) -> int:
        return max(0, self._newest.made - self.total_steps)

    @property
    def sent_steps(self) -> int:
        self._look()
        return max(self._newest.sent, self.total_steps)

    @property
    def waiting(self) -> int:
        self._look()
        return max(0, self._newest.messages - self.fragments)

    def ask(self, request: Request) -> None:
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

    def receive(self, timeout_s: float = 0.0) -> Collected | None:
        if not self._calls or not self._ray.wait(self.waits_on, timeout=timeout_s)[0]:
            return None
        try:
            report, body = self._ray.get(list(self._calls[0]))
        except self._ray.exceptions.RayError as error:
            raise self._exit(error) from None
        self.heard_at = time.monotonic()
        self._note(report)
        if report.kind == "failed":
            raise backend.WorkerExit("failed", report.why, report.details)
        self._calls.popleft()
        self.fragments += 1
        if report.kind == "fragment":
            if self._closed is None:
                self._call()
            return Collected(self._stored.open(body[0]), body[1])
        self._calls.clear()
        self._state_bytes = body or b""
        self.request = None
        return None

    def _exit(self, error: Exception) -> backend.WorkerExit:
        self._look()
        errors = self._ray.exceptions
        if self._hang is not None:
            return self._hang
        if isinstance(error, errors.ObjectLostError) or self._has_lost_node():
            return backend.WorkerExit("died with its node", details=str(error))
        if isinstance(error, errors.ActorUnavailableError):
            return backend.WorkerExit("cannot be reached", details=str(error))
        if isinstance(error, errors.RayActorError):
            why = word_unstarted(str(error))
            return backend.WorkerExit("died" if why is None else "did not start", why or "", str(error))
        return backend.WorkerExit("failed", str(error).partition("\n")[0], str(error))

    def _has_lost_node(self) -> bool:
        return any(node["NodeID"] == self._newest.node and not node["Alive"] for node in self._ray.nodes())

    def check_stall(self, stall_timeout_s: float) -> None:
        self._ask_progress()
        hang = self._find_hang(
            (self.num_envs, self._newest.made), stall_timeout_s, has_sent=bool(self.total_steps or self._newest.sent)
        )
        if hang is not None and self._hang is None:
            if not self._newest.pid:
                hang = backend.WorkerUnplaced(
                    "did not start",
                    f"no node may have the resources of a worker free ({self._options.describe_needs()})",
                )
            self._hang = hang
            self._kill()

    def _ask_progress(self) -> None:
        if self._question is not None and self._ray.wait([self._question], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError):
                self._note(self._ray.get(self._question))
            self._question = None
        now = time.monotonic()
        if self._question is None and now - max(self._asked_at, self.heard_at) > _REPORT_S:
            self._asked_at = now
            self._question = self._actor.report.options(concurrency_group=_CONTROL).remote()

    def _look(self) -> None:
        references = [call.report for call in self._calls]
        if references and self._ray.is_initialized():
            for reference in self._ray.wait(references, num_returns=len(references), timeout=0)[0]:
                with suppress(self._ray.exceptions.RayError):
                    self._note(self._ray.get(reference))

    def _note(self, report: Report) -> None:
        """Store a report unless a newer report is stored; a newer report has more messages or, if equal, more steps.

        The number of messages is compared first, because `made` decreases when a fragment omits completed steps.
        """
        newest = self._newest
        if (report.messages, report.made, report.num_envs) >= (newest.messages, newest.made, newest.num_envs):
            self._newest = report

    def terminate(self) -> None:
        # If the caller has shut Ray down, a call would start a new cluster.
        if self._ray.is_initialized():
            self._actor.stop.options(concurrency_group=_CONTROL).remote()
            self._closed = self._actor.close.remote()

    def drain(self, deadline: float) -> Iterator[Collected]:
        if self._closed is None:
            return
        with suppress(backend.WorkerExit):
            while self.request is not None and (left_s := deadline - time.monotonic()) > 0:
                fragment = self.receive(min(0.1, left_s))
                if fragment is not None:
                    yield fragment
        self._ray.wait([self._closed], timeout=max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        self._kill()
        self._calls.clear()
        self._question = self._closed = None

    def _kill(self) -> None:
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._actor, no_restart=True)


class StoredFragments:
    """Fragments of one worker that Ray's object store pins, because arrays of this process reference their memory.

    - `capacity_nbytes`: memory limit of a worker in bytes; a fragment is copied instead of pinned if the pinned
      fragments would exceed half of this limit.

    >>> from samplebatch import SampleBatch
    >>> stored = StoredFragments(1600)
    >>> kept = [stored.open(pack(SampleBatch(obs=np.zeros(100)))) for _ in range(2)]
    >>> stored.nbytes
    800
    >>> kept.clear()
    >>> stored.nbytes
    0
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self._max_nbytes = capacity_nbytes // 2
        self._leases: list[weakref.ref[npt.NDArray[np.uint8]]] = []

    @property
    def nbytes(self) -> int:
        """Size of the object store memory that arrays of this process reference, in bytes."""
        leases = [lease for lease in [tie() for tie in self._leases] if lease is not None]
        self._leases = [weakref.ref(lease) for lease in leases]
        return sum(lease.nbytes for lease in leases)

    def open(self, packed: Packed) -> Fragment:
        """Read a fragment without a copy, or copy the fragment if too many bytes would be pinned.

        A fragment is never copied if no other fragment is pinned, regardless of its size.
        """
        pinned_nbytes = self.nbytes
        # Each array over a buffer keeps its lease alive: deleting the last array releases the memory.
        leases = [np.ndarray(memoryview(buffer).nbytes, np.uint8, buffer) for buffer in packed[1]]
        fragment: Fragment = unpack(packed, leases)
        if pinned_nbytes and pinned_nbytes + sum(lease.nbytes for lease in leases) > self._max_nbytes:
            return fragment.copy()
        self._leases += [weakref.ref(lease) for lease in leases]
        return fragment


class StoredWeights(backend.Weights):
    """Newest weights in Ray's object store; actors receive an object reference with their calls.

    - `newest`: version, and a list with the object reference; 0 and an empty list before the first publication.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.newest: tuple[int, list[Any]] = (0, [])
        self._connect = connect
        self._encoder = Encoder(allow_pickle=False)
        self._publishing = threading.Lock()
        self._is_closed = False

    @property
    def version(self) -> int:
        return self.newest[0]

    def publish(self, weights: Mapping[str, Any]) -> int:
        self.check_open()
        batch = weights_to_batch(weights)
        with self._publishing:
            # Reject values that cannot be sent here, as a broadcast does.
            self._encoder.encode(batch)
            version = self.version + 1
            self.newest = version, [self._connect().put(pack(batch))]
        return version

    def latest(self) -> Publication:
        version, (reference,) = self.newest
        return read_weights(self._connect(), version, reference)

    def check_open(self) -> None:
        """Raise ChannelClosedError if the workers have been stopped."""
        if self._is_closed:
            raise ChannelClosedError("workers must be running to receive weights; they have been stopped")

    def close(self) -> None:
        """Drop the reference to the weights, so that Ray's object store can evict weights that no actor reads."""
        self._is_closed = True
        self.newest = self.version, []


_MODE = "RAY_AUTH_MODE"


_TOKEN = "token"
"""Value of the environment variable `_MODE` that enables authentication between Ray processes."""


_ANSWER_S: Final = 5.0
"""Timeout for an answer of the cluster that was started last on this machine."""


def connect(address: str | None) -> Any:
    """Connect to the requested cluster and return the module `ray`.

    On a machine with an authentication token, Ray enables authentication for any cluster that Ray discovers. A cluster
    without tokens cannot call a process that authenticates, and cancels the process's actors before they start. The
    connection to a cluster without tokens therefore uses the cluster's address, which leaves authentication disabled.
    """
    ray = require("ray", "ray")
    if not ray.is_initialized():
        # Ray has no public function for the address search of `ray.init`.
        cluster_address = require("ray._private.services", "ray").canonicalize_bootstrap_address(address)
        if cluster_address is not None and address in (None, "auto") and not os.environ.get("RAY_ADDRESS"):
            _check_last_cluster(cluster_address)
        ray.init(
            address=cluster_address
            if cluster_address is not None and _has_tokens(cluster_address) is False
            else address
        )
    connected = ray.get_runtime_context().gcs_address
    if address == "local":
        # Ray has no public attribute for the node of this process.
        if require("ray._private.worker", "ray")._global_node.head:
            return ray
    elif address in (None, "auto", connected):
        return ray
    raise ArgumentError(
        f"address must be {connected!r}, the cluster that this process is connected to, got {address!r}"
    )


def _check_last_cluster(address: str) -> None:
    """Check that the cluster in Ray's address file, the newest cluster on this machine, still replies."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        path = require("ray._private.utils", "ray").get_ray_address_file(None)
        raise ArgumentError(
            f"the cluster of Ray that was started last on this machine must answer at {address} "
            f"({error}); remove its file, {path}, or pass RayOptions(address=...): 'local' starts a cluster"
        ) from error


def check_tokens(address: str) -> None:
    """Raise ArgumentError if this process uses authentication, but the cluster uses no tokens."""
    mode = os.environ.get(_MODE, "")
    if mode.lower() == _TOKEN and _has_tokens(address) is False:
        raise ArgumentError(
            f"{_MODE} must be 'disabled' from the start of the process for workers on the cluster of Ray at {address}, "
            f"which was started without tokens, got {mode!r}; Ray also sets it in a process that starts a cluster"
        )


def _has_tokens(address: str) -> bool | None:
    """Read from the local raylet's environment whether a cluster uses tokens; None if reading fails."""
    address_option = f"--gcs-address={address}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            if command[0].endswith(b"/raylet") and address_option in command:
                return f"{_MODE}={_TOKEN}".encode().lower() in (process / "environ").read_bytes().lower().split(b"\0")
    return None


def word_unstarted(account: str) -> str | None:
    """Extract the reason from Ray's error message if an actor died before it started; None for other messages.

    >>> word_unstarted('''The actor died unexpectedly before finishing this task.
    ... The actor is dead because it was killed by `ray.kill`.
    ... The actor never ran - it was cancelled before it started running.''')
    'The actor is dead because it was killed by `ray.kill`.'
    >>> word_unstarted("The actor died unexpectedly before finishing this task.")
    """
    before, never_ran, _ = account.partition("\nThe actor never ran")
    return before.splitlines()[-1].strip() if never_ran else None

"""RayBackend: workers as actors on a cluster of Ray."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from samplebatch.errors import ArgumentError, EnvironmentSpecError, require
from samplebatch.policy.source import PickledPolicy
from samplebatch.workers.backend import Backend, BackendOptions, Worker
from samplebatch.workers.ray_options import RayOptions
from samplebatch.workers.ray_weights import StoredWeights
from samplebatch.workers.ray_worker import RayWorker
from samplebatch.workers.spec import WorkerSpec

_LENT = 2
"""Which part of the node's object store may be the memory of all workers' fragments, if nobody says how large it is."""


class RayBackend(Backend):
    """Actors on a cluster of Ray, whose fragments lie in its object store; see `Backend`.

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
        self._weights = StoredWeights(self._connect)

    def pack_policy(self, policy: Any) -> Callable[[], Any]:
        """Pickle a policy, by value where its module is the script that runs."""
        return PickledPolicy(policy, self._ray.cloudpickle.dumps)

    @property
    def weights(self) -> StoredWeights:
        """The newest weights."""
        return self._weights

    def open(self, workers: int) -> None:
        """Connect to the cluster."""
        self._weights.check_open()
        ray = self._connect()
        if self._options.capacity_bytes is None:
            here = ray.get_runtime_context().get_node_id()
            stores = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["NodeID"] == here]
            self._capacity_bytes = min(self._capacity_bytes, int(max(stores)) // (_LENT * self._options.num_workers))

    def _connect(self) -> Any:
        """Return the module `ray`, connected to the cluster that was asked for.

        Raises
        ------
        ArgumentError
            If this process is connected to another one.
        """
        ray, address = self._ray, self._given.address
        if not ray.is_initialized():
            ray.init(address=address)
        found = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", found):
            raise ArgumentError(
                f"address must be of the cluster that this process is connected to, {found!r}, got {address!r}"
            )
        return ray

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
                f"environment, policy_mapping and hooks go to other processes, and must be names or functions that can "
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

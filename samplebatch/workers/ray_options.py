"""RayOptions: the cluster of Ray that workers run on, and how much of it each takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samplebatch.arguments import whole
from samplebatch.errors import ArgumentError


@dataclass(frozen=True)
class RayOptions:
    """The cluster of Ray that `RolloutWorkers` run on, the resources and placement of each, and requests in flight.

    Attributes
    ----------
    address
        The running cluster to connect to, as `host:port` or `"auto"`, of which this machine is a node. By default the
        one that this process is connected to, or that the environment variable `RAY_ADDRESS` names, or that was started
        last on this machine; a new one if there is none.
    num_cpus, num_gpus
        How many of these each worker takes; torch uses as many threads there as CPUs, one at least.
    memory
        Bytes of memory that Ray sets aside for each worker; None for no number.
    resources
        Further resources of each worker, by the names that nodes give them.
    scheduling_strategy
        Which nodes workers run on, as Ray takes it: `"DEFAULT"`, `"SPREAD"`, a `PlacementGroupSchedulingStrategy`, a
        `NodeAffinitySchedulingStrategy` or a `NodeLabelSchedulingStrategy`.
    runtime_env
        The environment of each worker's process, as Ray takes it, such as `{"env_vars": {...}}`.
    in_flight
        Fragments that each worker may be asked for and that have not been received: one is collected while the others
        wait in the object store.

    Raises
    ------
    ArgumentError
        If a number is negative, `in_flight` is no whole number from 1, or the address is one of Ray Client, whose
        process is outside the cluster and shares no memory with it.

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
                "address must be of a cluster that this machine is a node of, as host:port or 'auto', got one of Ray "
                f"Client: {self.address!r}"
            )
        amounts = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **self.resources}
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
                raise ArgumentError(f"{name} must be a number from 0, got {amount!r}")
        if self.memory is not None:
            whole("memory", self.memory, 1)
        whole("in_flight", self.in_flight, 1)

    def for_actor(self) -> dict[str, Any]:
        """Return the options that Ray takes for an actor."""
        given = {
            "memory": self.memory,
            "resources": dict(self.resources) or None,
            "scheduling_strategy": self.scheduling_strategy,
            "runtime_env": None if self.runtime_env is None else dict(self.runtime_env),
        }
        wanted = {name: value for name, value in given.items() if value is not None}
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **wanted}

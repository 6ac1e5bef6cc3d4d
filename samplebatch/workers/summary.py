"""RunSummary: the counts of a run of rollout workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.rollout.statistics import finished_episodes


@dataclass(frozen=True)
class WorkerFailure:
    """The failure, death or hang of a worker.

    Attributes
    ----------
    index, pid
        Which worker it was.
    how
        How it ended, such as `was killed by SIGKILL`.
    env_steps
        Steps that it had sent, and that count.
    lost_steps
        Steps that it had made and not sent, as far as is known: they are dropped.
    env_ids
        Its environments. The episodes that were under way in them will never end: see `Aggregator.drop_unfinished`.
    replaced
        Whether another took its place.
    """

    index: int
    pid: int
    how: str
    env_steps: int
    lost_steps: int
    env_ids: range
    replaced: bool

    def __str__(self) -> str:
        what = "replaced" if self.replaced else "not replaced"
        return (
            f"worker {self.index} (process {self.pid}) {self.how} after sending {self.env_steps} steps; "
            f"{self.lost_steps} steps lost; {what}"
        )


@dataclass(frozen=True)
class RunSummary:
    """The counts of a run so far, for its user.

    Attributes
    ----------
    env_steps, agent_steps, episodes, nbytes, fragments
        Of all fragments that were received: environment steps, steps of all agents, episodes that ended, bytes of the
        columns, and how many fragments.
    sent_steps
        Environment steps in the fragments that workers have sent, as they count them themselves. At the end of a run in
        which none was killed it is `env_steps`.
    queue_depth
        Fragments that were sent and not received yet.
    lost_steps
        Environment steps that workers which failed, died or hung had made and not sent, as far as is known: a worker
        counts each step in shared memory once it is made.
    restarts
        What happened to which worker, in order.
    versions
        Environment steps by the version of the weights that they were made with.
    """

    env_steps: int = 0
    agent_steps: int = 0
    episodes: int = 0
    nbytes: int = 0
    fragments: int = 0
    sent_steps: int = 0
    queue_depth: int = 0
    lost_steps: int = 0
    restarts: list[WorkerFailure] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)


class Counted(Protocol):
    """The counts of a worker."""

    env_steps: int
    episodes: int

    @property
    def sent_steps(self) -> int:
        """Environment steps in the fragments that it has sent."""
        ...

    @property
    def waiting(self) -> int:
        """Fragments that were sent and not received yet."""
        ...


class RunCount:
    """The counts of fragments that workers sent, and of their failures.

    Attributes
    ----------
    incidents
        What happened to workers.
    """

    def __init__(self) -> None:
        self.incidents: list[WorkerFailure] = []
        self._env_steps = self._agent_steps = self._episodes = self._nbytes = self._fragments = 0
        self._sent_before = 0
        self._versions: dict[int, int] = {}

    def add(self, worker: Counted, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Count a fragment that a worker has sent."""
        policies = fragment.as_multi_agent().policy_batches
        env_steps, ended = fragment.env_steps(), len(finished_episodes(fragment))
        worker.env_steps += env_steps
        worker.episodes += ended
        self._env_steps += env_steps
        self._agent_steps += fragment.agent_steps()
        self._episodes += ended
        self._nbytes += fragment.size_bytes()
        self._fragments += 1
        stamped = [steps for steps in policies.values() if steps.count and names.WEIGHTS_VERSION in steps]
        if stamped:
            version = int(stamped[0][names.WEIGHTS_VERSION][0])
            self._versions[version] = self._versions.get(version, 0) + env_steps

    def lose(self, incident: WorkerFailure, worker: Counted) -> None:
        """Note the failure of a worker that is replaced or gone."""
        self.incidents.append(incident)
        if incident.replaced:
            self.keep([worker])

    def keep(self, workers: Iterable[Counted]) -> None:
        """Keep the counts of workers that are replaced or gone."""
        self._sent_before += sum(worker.sent_steps for worker in workers)

    def summary(self, workers: Iterable[Counted]) -> RunSummary:
        """Sum up."""
        workers = list(workers)
        return RunSummary(
            env_steps=self._env_steps,
            agent_steps=self._agent_steps,
            episodes=self._episodes,
            nbytes=self._nbytes,
            fragments=self._fragments,
            sent_steps=self._sent_before + sum(worker.sent_steps for worker in workers),
            queue_depth=sum(worker.waiting for worker in workers),
            lost_steps=sum(incident.lost_steps for incident in self.incidents),
            restarts=list(self.incidents),
            versions=dict(sorted(self._versions.items())),
        )

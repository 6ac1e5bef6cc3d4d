"""Fragments of a worker's task, with and without a channel, and checks that both agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from samplebatch import broadcast, channel, concat_samples
from samplebatch.rollout.postprocessing import Hook
from samplebatch.workers.task import Request, Task, WorkerSpec, make_task


def plan(environment: Any, policy: Any = "random", *, envs: int = 3, hooks: tuple[Hook, ...] = ()) -> WorkerSpec:
    seeds = np.random.SeedSequence(1)
    return WorkerSpec(0, (environment,) * envs, lambda: policy, envs, None, False, None, hooks, seeds)


def begin(of: WorkerSpec) -> Task:
    """Create a task that collects fragments of sixty steps indefinitely."""
    task = make_task(of, broadcast(1)[1], lambda _: None)
    task.begin(Request(fragment_length=60))
    return task


def sent(of: WorkerSpec, fragments: int, capacity_nbytes: int = 1 << 20) -> list[Any]:
    """Send fragments through a channel; return copies of the received fragments."""
    producer, consumer = channel(capacity_nbytes, allow_pickle=True)
    arrived: list[Any] = []
    with producer, consumer:
        task = begin(of)
        for _ in range(fragments):
            fragment = task.next()
            assert fragment is not None
            producer.send(fragment, split=True)
            del fragment
            while consumer.poll():
                arrived.append(consumer.recv().copy())
        task.close()
    return arrived


def made(of: WorkerSpec, fragments: int) -> list[Any]:
    """Collect the same fragments without sending them."""
    task = begin(of)
    actual = [task.next() for _ in range(fragments)]
    task.close()
    return [fragment for fragment in actual if fragment is not None]


def check_same(some: list[Any], others: list[Any]) -> None:
    first, other = (concat_samples(part).as_multi_agent().policy_batches for part in (some, others))
    assert list(first) == list(other)
    for policy, steps in first.items():
        assert steps.column_names == other[policy].column_names
        for name in steps.column_names:
            if name != "eps_id":
                assert steps.column(name).dtype == other[policy].column(name).dtype
                assert steps[name].tolist() == other[policy][name].tolist(), name
        # Ids differ between runs, episodes do not.
        for ids in (steps["eps_id"], other[policy]["eps_id"]):
            assert len(np.unique(ids)) == len(np.unique(steps["eps_id"]))

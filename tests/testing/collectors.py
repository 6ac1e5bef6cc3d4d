"""How the collectors of the library are put to the contracts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from samplebatch import (
    AsyncCollector,
    Collector,
    MultiAgentBatch,
    MultiAgentCollector,
    RolloutWorkers,
    SampleBatch,
    concat_samples,
)
from samplebatch.rollout.multi_agent_collector import PolicyMapping
from samplebatch.testing import CollectorContract, MultiAgentContract
from samplebatch.testing.collector_contract import Makers
from samplebatch.testing.multi_agent_contract import everyone


def vector_of(makers: Makers, mode: str) -> SyncVectorEnv:
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))


class CollectorCase(CollectorContract):
    def make(self, makers: Makers, policy: Any, mode: str, **options: Any) -> Collector | RolloutWorkers:
        return Collector(policy, vector_of(makers, mode), **options)

    def collect(
        self,
        makers: Makers,
        policy: Any,
        *,
        mode: str,
        times: int = 1,
        seed: Any = None,
        hooks: Any = (),
        **n: Any,
    ) -> list[SampleBatch]:
        with self.make(makers, policy, mode, seed=seed, hooks=hooks) as collector:
            return [collector.collect(**n).batch for _ in range(times)]

    def collect_after_failure(
        self, makers: Makers, policy: Any, *, mode: str, n_step: int
    ) -> tuple[BaseException, list[SampleBatch]]:
        with self.make(makers, policy, mode) as collector:
            try:
                return AssertionError("nothing was raised"), [collector.collect(n_step=n_step).batch]
            except Exception as error:
                return error, [collector.collect(n_step=1).batch]


class CollectorStepByStepCase(CollectorCase):
    """Collector with a step hook, whose chunks have one step each."""

    def make(self, makers: Makers, policy: Any, mode: str, **options: Any) -> Collector:
        return Collector(policy, vector_of(makers, mode), on_step_hook=lambda decided, transitions: None, **options)


class CollectorOfCopiesCase(CollectorCase):
    """Collector of vector environments that reuse their arrays."""

    def make(self, makers: Makers, policy: Any, mode: str, **options: Any) -> Collector:
        env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode), copy=False)
        return Collector(policy, env, **options)


class EnvironmentListCase(CollectorCase):
    """Collector of single environments, which have no autoreset modes: they are reset immediately."""

    modes = ("SameStep",)

    def make(self, makers: Makers, policy: Any, mode: str, **options: Any) -> Collector:
        return Collector(policy, makers[0]() if len(makers) == 1 else [make() for make in makers], **options)


class EnvironmentListStepByStepCase(EnvironmentListCase):
    """Collector of single environments with a step hook."""

    def make(self, makers: Makers, policy: Any, mode: str, **options: Any) -> Collector:
        return Collector(policy, list(makers), on_step_hook=lambda decided, transitions: None, **options)


class AsyncCollectorCase(CollectorCase):
    """Collector of environments in separate processes, which have no autoreset modes."""

    modes = ("Disabled",)

    def make(self, makers: Makers, policy: Any, mode: str, **options: Any) -> Collector:
        return AsyncCollector(policy, makers, start_method="fork", **options)

    def collect_after_failure(
        self, makers: Makers, policy: Any, *, mode: str, n_step: int
    ) -> tuple[BaseException, list[SampleBatch]]:
        batches: list[SampleBatch] = []
        with self.make(makers, policy, mode) as collector:
            try:
                # One environment may make all the steps before another one fails.
                while len(batches) < 1000:
                    batches.append(collector.collect(n_step=n_step).batch)
            except Exception as error:
                return error, [*batches, collector.collect(n_step=1).batch]
        return AssertionError("nothing was raised"), batches


class Worked:
    """Collector that uses `RolloutWorkers` in this process."""

    keeps_steps = False

    def fragments(
        self, env: Any, policy: Any, amounts: dict[str, int], **options: Any
    ) -> tuple[BaseException | None, list[Any]]:
        actual: list[Any] = []
        try:
            with RolloutWorkers(policy, env, num_workers=1, backend="inline", **options) as workers:
                for fragment in workers.fragments(**amounts):
                    actual.append(fragment)
        except Exception as error:
            return error, actual
        return None, actual


class WorkersCase(Worked, CollectorContract):
    """Worker whose environment is a vector environment."""

    def environments(self, makers: Makers, mode: str) -> dict[str, Any]:
        return {"env": partial(vector_of, makers, mode)}

    def collect(
        self,
        makers: Makers,
        policy: Any,
        *,
        mode: str,
        n_step: int | None = None,
        n_episode: int | None = None,
        times: int = 1,
        seed: int | None = None,
        hooks: Sequence[Any] = (),
    ) -> list[SampleBatch]:
        # A fragment has as many steps of each environment as of the others.
        length = -(-(n_step or 0) // len(makers)) * len(makers)
        steps = {"n_step": n_step if times == 1 else times * length, "fragment_length": length}
        original = steps if n_episode is None else {"n_episode": n_episode}
        error, actual = self.fragments(
            policy=policy, amounts=original, seed=seed, hooks=hooks, **self.environments(makers, mode)
        )
        if error is not None:
            raise error
        return actual if n_episode is None else [concat_samples(actual)]

    def collect_after_failure(
        self, makers: Makers, policy: Any, *, mode: str, n_step: int
    ) -> tuple[BaseException, list[SampleBatch]]:
        options = {"n_step": n_step, "fragment_length": 4}
        error, actual = self.fragments(policy=policy, amounts=options, **self.environments(makers, mode))
        return error or AssertionError("nothing was raised"), actual


class WorkersCollectCase(CollectorCase):
    """Worker whose batches are requested one after another."""

    keeps_steps = False

    def make(self, makers: Makers, policy: Any, mode: str, **options: Any) -> RolloutWorkers:
        return RolloutWorkers(policy, partial(vector_of, makers, mode), num_workers=1, backend="inline", **options)

    def collect_after_failure(
        self, makers: Makers, policy: Any, *, mode: str, n_step: int
    ) -> tuple[BaseException, list[SampleBatch]]:
        actual: list[SampleBatch] = []
        with self.make(makers, policy, mode) as workers:
            try:
                while len(actual) < n_step:
                    actual.append(workers.collect(n_step=4).batch)
            except Exception as error:
                return error, [*actual, *workers.fragments()]
        return AssertionError("nothing was raised"), actual


class WorkersOfSeveralCase(WorkersCase):
    """Worker that creates several environments one after another."""

    modes = ("SameStep",)

    def environments(self, makers: Makers, mode: str) -> dict[str, Any]:
        waiting = list(makers)
        return {"env": lambda: waiting.pop(0)(), "envs_per_worker": len(makers)}


class MultiAgentCollectorCase(MultiAgentContract):
    def collect(
        self,
        makers: Makers,
        policies: Any,
        *,
        policy_mapping: PolicyMapping = everyone,
        times: int = 1,
        seed: Any = None,
        hooks: Any = (),
        **n: Any,
    ) -> list[MultiAgentBatch]:
        options = {"policy_mapping": policy_mapping, "seed": seed, "hooks": hooks}
        collector = MultiAgentCollector(policies, [make() for make in makers], **options)
        return [collector.collect(**n).batch for _ in range(times)]

    def collect_after_failure(
        self, makers: Makers, policies: Any, *, n_step: int
    ) -> tuple[BaseException, list[MultiAgentBatch]]:
        collector = MultiAgentCollector(policies, [make() for make in makers], policy_mapping=everyone)
        try:
            return AssertionError("nothing was raised"), [collector.collect(n_step=n_step).batch]
        except Exception as error:
            collector.reset()
            return error, [collector.collect(n_step=1).batch]


def grouped(batch: MultiAgentBatch) -> MultiAgentBatch:
    """Sort the steps of a fragment by agent; a fragment has one episode per environment."""
    for policy_id, steps in batch.policy_batches.items():
        order = np.lexsort((steps["agent_index"], steps["env_id"]))
        batch.policy_batches[policy_id] = steps.take(order)
    return batch


class MultiAgentWorkersCase(Worked, MultiAgentContract):
    """Worker that creates several multi-agent environments of one kind."""

    def collect(
        self,
        makers: Makers,
        policies: Any,
        *,
        policy_mapping: PolicyMapping = everyone,
        n_step: int | None = None,
        n_episode: int | None = None,
        times: int = 1,
        seed: int | None = None,
        hooks: Sequence[Any] = (),
    ) -> list[MultiAgentBatch]:
        options = {"n_episode": n_episode} if n_step is None else {"n_step": times * n_step, "fragment_length": n_step}
        error, actual = self.fragments(
            makers[0],
            policies,
            envs_per_worker=len(makers),
            policy_mapping=policy_mapping,
            seed=seed,
            hooks=hooks,
            amounts=options,
        )
        if error is not None:
            raise error
        return actual if n_episode is None else [grouped(concat_samples(actual))]

    def collect_after_failure(
        self, makers: Makers, policies: Any, *, n_step: int
    ) -> tuple[BaseException, list[MultiAgentBatch]]:
        waiting = list(makers)
        error, actual = self.fragments(
            lambda: waiting.pop(0)(),
            policies,
            envs_per_worker=len(makers),
            policy_mapping=everyone,
            amounts={"n_step": n_step, "fragment_length": 4},
        )
        return error or AssertionError("nothing was raised"), actual


class MultiAgentWorkersCollectCase(MultiAgentWorkersCase):
    """Multi-agent worker whose batches are requested one after another."""

    def collect(
        self,
        makers: Makers,
        policies: Any,
        *,
        policy_mapping: PolicyMapping = everyone,
        times: int = 1,
        seed: Any = None,
        hooks: Any = (),
        **n: Any,
    ) -> list[MultiAgentBatch]:
        options = {"policy_mapping": policy_mapping, "seed": seed, "hooks": hooks, "backend": "inline"}
        with RolloutWorkers(policies, makers[0], num_workers=1, envs_per_worker=len(makers), **options) as workers:
            return [workers.collect(**n).batch for _ in range(times)]

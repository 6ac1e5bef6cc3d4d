"""The contracts notice collectors that break them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import collectors
import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.testing import CollectorContract, MultiAgentContract

Breach = Callable[[SampleBatch], SampleBatch]


def broken(contract: type[Any], breach: Breach) -> Any:
    """Create a contract's test class whose collector damages every batch."""

    def spoilt(batch: Any) -> Any:
        if isinstance(batch, MultiAgentBatch):
            parts = {policy_id: breach(steps) for policy_id, steps in batch.policy_batches.items()}
            return MultiAgentBatch(parts, batch.count)
        return breach(batch)

    class Broken(contract):  # type: ignore[misc]
        modes = ("NextStep",)

        def collect(self, *args: Any, **options: Any) -> list[Any]:
            return [spoilt(batch) for batch in super().collect(*args, **options)]

        def collect_after_failure(self, *args: Any, **options: Any) -> tuple[BaseException, list[Any]]:
            error, batches = super().collect_after_failure(*args, **options)
            return error, [spoilt(batch) for batch in batches]

    return Broken()


def with_column(batch: SampleBatch, name: str, change: Callable[[Any], Any]) -> SampleBatch:
    ours = batch.copy()
    ours[name] = change(np.array(ours[name]))
    return ours


def rolled(values: Any) -> Any:
    return np.roll(values, 1, axis=0)


def first_observations_at_ends(batch: SampleBatch) -> SampleBatch:
    ends = np.asarray(batch["terminateds"]) | np.asarray(batch["truncateds"])
    return with_column(batch, "new_obs", lambda obs: np.where(ends[:, None], obs * [1, 1, 0][-obs.shape[1] :], obs))


def by_time(batch: SampleBatch) -> SampleBatch:
    return batch.take(np.argsort(batch["t"], kind="stable"))


ROWS, CALLS = "test_every_row_is_a_step_that_was_made", "test_episodes_go_on_in_the_next_call"
EPISODES, FAILURE = "test_exactly_as_many_episodes_as_asked", "test_an_environment_that_raises_costs_no_step_before"

BREACHES: list[tuple[str, Breach]] = [
    (ROWS, first_observations_at_ends),
    (ROWS, lambda batch: with_column(batch, "t", lambda t: t + 1)),
    (ROWS, lambda batch: with_column(batch, "terminateds", rolled)),
    (ROWS, lambda batch: with_column(batch, "rewards", rolled)),
    (ROWS, lambda batch: with_column(batch, "actions", rolled)),
    (CALLS, by_time),
    (CALLS, lambda batch: batch.take([0, *range(len(batch))])),
    (CALLS, lambda batch: with_column(batch, "eps_id", lambda ids: ids ^ np.int64(np.random.randint(1 << 30)))),
    (CALLS, lambda batch: with_column(batch, "rewards", lambda rewards: rewards.astype(np.float32))),
    (EPISODES, lambda batch: batch[1:]),
    (FAILURE, lambda batch: batch[:0]),
    ("test_columns_of_the_policy_are_kept_and_widened", lambda batch: with_column(batch, "vf_preds", np.round)),
    ("test_hooks_see_every_trajectory_once", lambda batch: with_column(batch, "place", rolled)),
]
SEEDS = {
    CollectorContract: "test_the_same_seed_gives_the_same_data",
    MultiAgentContract: "test_the_same_seed_gives_the_same_actions",
}


@pytest.mark.parametrize("case", [collectors.CollectorCase, collectors.MultiAgentCollectorCase])
@pytest.mark.parametrize(("test", "breach"), BREACHES)
def test_contract_violations_are_detected(case: type[Any], test: str, breach: Breach) -> None:
    with pytest.raises(AssertionError):
        getattr(broken(case, breach), test)()


def test_infos_of_other_steps_are_detected() -> None:
    with pytest.raises(AssertionError, match="'infos'"):
        broken(
            collectors.CollectorCase, lambda batch: with_column(batch, "infos", rolled)
        ).test_infos_belong_to_their_step()


@pytest.mark.parametrize("case", [collectors.CollectorCase, collectors.MultiAgentCollectorCase])
def test_ignored_seeds_are_detected(case: type[Any]) -> None:
    class Unseeded(case):  # type: ignore[misc]
        def collect(self, *args: Any, seed: int | None = None, **options: Any) -> list[Any]:
            return super().collect(*args, **options)

    (test,) = [name for contract, name in SEEDS.items() if issubclass(case, contract)]
    with pytest.raises(AssertionError, match="the same seed"):
        getattr(Unseeded(), test)()

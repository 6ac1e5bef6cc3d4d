"""Test suite of single-agent collectors, for every autoreset mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import SampleBatchError
from samplebatch.testing.environments import RungError, by_stream, check, check_steps, ladder, number_rows, says, walk

Makers = Sequence[Callable[[], Any]]
"""Functions that each create an environment."""

_LENGTHS = (2, 5, 9)


def climb(obs: Any) -> Any:
    """Return one action per `ladder` observation: the third element of the observation, modulo 3."""
    return (obs[:, 2] % 3).astype(np.int64)


def stay(obs: Any) -> Any:
    """Return action 0 for every observation."""
    return np.zeros(len(obs), np.int64)


class CollectorContract(ABC):
    """Test suite of a single-agent collector, for authors of collectors and environment adapters.

    Derive a test class and implement the abstract methods. pytest and other runners that call methods named `test_*`
    run the tests.

    Attributes
    ----------
    modes
        Autoreset modes to test, with the names of Gymnasium's `AutoresetMode`.
    keeps_steps
        Whether steps completed before a failure are returned by a later call.

    Examples
    --------
    >>> from gymnasium.vector import AutoresetMode, SyncVectorEnv
    >>> from samplebatch.rollout.collector import Collector
    >>> class TestCollector(CollectorContract):
    ...     def collect(
    ...         self, makers, policy, *, mode, n_step=None, n_episode=None, times=1, **given
    ...     ):
    ...         env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))
    ...         with Collector(policy, env, **given) as collector:
    ...             return [
    ...                 collector.collect(n_step=n_step, n_episode=n_episode).batch
    ...                 for _ in range(times)
    ...             ]
    ...
    ...     def collect_after_failure(self, makers, policy, *, mode, n_step):
    ...         env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))
    ...         with Collector(policy, env) as collector:
    ...             try:
    ...                 batch = collector.collect(n_step=n_step).batch
    ...                 return AssertionError("nothing was raised"), [batch]
    ...             except Exception as error:
    ...                 return error, [collector.collect(n_step=1).batch]
    >>> TestCollector().test_exactly_as_many_episodes_as_asked()
    """

    modes: Sequence[str] = ("NextStep", "SameStep", "Disabled")
    keeps_steps = True

    @abstractmethod
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
        """Create a collector and call its method `collect`, once or several times.

        Parameters
        ----------
        makers
            Functions that each create an environment.
        policy
            A function of observations.
        mode
            Autoreset mode.
        n_step, n_episode
            Number of steps, or of episodes, per call; exactly one of both is passed.
        times
            Number of calls.
        seed, hooks
            Arguments with which the collector is created.

        Returns
        -------
        List of the batches that the calls returned, in order of the calls.
        """

    @abstractmethod
    def collect_after_failure(
        self, makers: Makers, policy: Any, *, mode: str, n_step: int
    ) -> tuple[BaseException, list[SampleBatch]]:
        """Collect until an error is raised; return the error and all steps that were returned before and after it."""

    # -- every batch ---------------------------------------------------------------------------------------------------

    def test_every_row_is_a_step_that_was_made(self) -> None:
        """In all autoreset modes, no row is a reset, no final observation is lost, and values are the environment's."""
        for mode in self.modes:
            for truncates in (False, True):
                (batch,) = self.collect(_ladders(truncates=truncates), climb, mode=mode, n_step=50)
                check_ladder(batch, _LENGTHS, truncates=truncates)

    def test_steps_of_an_environment_lie_together(self) -> None:
        """Rows are ordered by environment; the rows of each environment are contiguous and in time order."""
        for mode in self.modes:
            (batch,) = self.collect(_ladders(), climb, mode=mode, n_step=50)
            check_steps(batch)
            check((np.diff(batch["env_id"]) >= 0).all(), "rows must be in order of 'env_id'")

    def test_episodes_go_on_in_the_next_call(self) -> None:
        """There are no gaps between successive batches, and an episode has the same id in all batches."""
        for mode in self.modes:
            batches = self.collect(_ladders(), climb, mode=mode, n_step=12, times=4)
            check(len(batches) == 4, f"4 calls must give 4 batches, got {len(batches)}")
            for steps in by_stream(batches).values():
                check_steps(steps)
                check(steps["t"][0] == 0, "the first step must be the first of its episode")

    def test_a_single_environment_is_collected_alike(self) -> None:
        """A collector of a single environment returns exactly `n_step` correct steps."""
        for mode in self.modes:
            batches = self.collect([partial(ladder, 0, 5)], climb, mode=mode, n_step=7, times=2)
            check([len(batch) for batch in batches] == [7, 7], "one environment must make exactly n_step steps")
            for batch in batches:
                check_ladder(batch, [5])
                check_steps(batch)

    # -- how much ------------------------------------------------------------------------------------------------------

    def test_as_many_steps_as_asked(self) -> None:
        """The batch has at least `n_step` steps, and fewer additional steps than environments."""
        for mode in self.modes:
            for n_step in (1, 3, 10):
                (batch,) = self.collect(_ladders(), climb, mode=mode, n_step=n_step)
                count = len(batch)
                check(
                    n_step <= count < n_step + len(_LENGTHS),
                    f"n_step={n_step} must give that many steps or slightly more, got {count}",
                )

    def test_exactly_as_many_episodes_as_asked(self) -> None:
        """A batch has exactly `n_episode` episodes, and all of these episodes are complete."""
        for mode in self.modes:
            for n_episode in (1, 3, 7):
                (batch,) = self.collect(_ladders(), climb, mode=mode, n_episode=n_episode)
                check_ladder(batch, _LENGTHS)
                check_steps(batch)
                ends = int((batch["terminateds"] | batch["truncateds"]).sum())
                check(ends == n_episode, f"n_episode={n_episode} must give exactly that many, got {ends}")
                stored = len(np.unique(batch["eps_id"]))
                check(
                    stored == n_episode,
                    f"all steps must be in the {n_episode} finished episodes, got {stored} episodes",
                )
                if n_episode == len(_LENGTHS):
                    lengths = np.sort(np.unique(batch["eps_id"], return_counts=True)[1]).tolist()
                    check(lengths == list(_LENGTHS), f"each environment must give an episode, got lengths {lengths}")

    # -- seeds ---------------------------------------------------------------------------------------------------------

    def test_the_same_seed_gives_the_same_data(self) -> None:
        """The seed determines all columns except `eps_id`; two different seeds result in different columns."""
        for mode in self.modes:
            first, same, other = (self._walked(mode, seed) for seed in (3, 3, 4))
            check(first.keys() == same.keys(), "the same seed must give the same environments")
            for key, rewards in first.items():
                check(_alike(rewards, same[key]), f"the same seed must give the same data, env_id {key[0]} differs")
            check(
                not all(_alike(rewards, other[key]) for key, rewards in first.items()),
                "another seed must give different data",
            )

    def test_environments_are_unlike_each_other(self) -> None:
        """Each environment has its own seed, and the environment's generator is not reset between episodes."""
        for mode in self.modes:
            walked = self._walked(mode, 3)
            check(not _alike(walked[0, 0], walked[1, 0]), "environments must have different seeds")
            values = np.concatenate(list(walked.values()))
            check(len(np.unique(values)) == len(values), "no two episodes must draw the same numbers")

    def test_data_do_not_depend_on_how_many_environments_there_are(self) -> None:
        """The seed and the index of an environment determine its data."""
        for mode in self.modes:
            few, many = self._walked(mode, 3), self._walked(mode, 3, count=5)
            for key, rewards in few.items():
                check(_alike(rewards, many[key]), f"env_id {key[0]} must not depend on the number of environments")

    def _walked(self, mode: str, seed: int, count: int = 3) -> dict[tuple[int, int], Any]:
        batches = self.collect([walk] * count, stay, mode=mode, n_step=30 * count, seed=seed)
        return {key: np.asarray(steps["rewards"]) for key, steps in by_stream(batches).items()}

    # -- infos, hooks, columns -----------------------------------------------------------------------------------------

    def test_infos_belong_to_their_step(self) -> None:
        """Every row contains the info of its step, including the last step of an episode."""
        for mode in self.modes:
            (batch,) = self.collect(_ladders(), climb, mode=mode, n_step=50)
            steps = np.asarray(batch["obs"])[:, 2] + 1
            recorded = [info.get("step") for info in batch["infos"].tolist()]
            check(recorded == steps.tolist(), "column 'infos' must contain the info of each row's step")

    def test_hooks_see_every_trajectory_once(self) -> None:
        """A hook is called once per episode in each batch, and may add columns."""
        for mode in self.modes:
            (batch,) = self.collect(_ladders(), climb, mode=mode, n_step=50, hooks=[number_rows])
            offsets = np.asarray(batch["place"])
            _, first, counts = np.unique(batch["eps_id"], return_index=True, return_counts=True)
            for start, count in zip(first.tolist(), counts.tolist(), strict=True):
                numbers = offsets[start : start + count].tolist()
                check(numbers == list(range(count)), "a hook must be called with all steps of an episode in order")

    def test_columns_of_the_policy_are_kept_and_widened(self) -> None:
        """A policy's additional outputs are stored with their step; wider dtypes are stored without rounding."""
        for mode in self.modes:
            (batch,) = self.collect(_ladders(), _telling, mode=mode, n_step=50)
            check(batch["vf_preds"].dtype == np.float64, "a column of integers must widen to floats")
            expected = np.where(batch["obs"][:, 2] == 0, 7.0, batch["obs"][:, 2] + 0.5)
            check(
                np.array_equal(batch["vf_preds"], expected),
                "column 'vf_preds' must contain the policy's value estimates",
            )

    # -- failures ------------------------------------------------------------------------------------------------------

    def test_an_environment_that_raises_costs_no_step_before(self) -> None:
        """Steps completed before a failure are correct and have no gaps."""
        for mode in self.modes:
            makers = [partial(ladder, 0, 5), partial(ladder, 1, 5, fails_at=9)]
            error, batches = self.collect_after_failure(makers, climb, mode=mode, n_step=60)
            check(says(error, RungError, "the rung broke"), f"the environment's error must be reported, got {error!r}")
            self._check_kept(batches, 8)

    def test_a_policy_that_raises_costs_no_step_before(self) -> None:
        """Steps completed before a failure are correct and have no gaps."""
        for mode in self.modes:
            makers = [partial(ladder, 0, 5), partial(ladder, 1, 5)]
            error, batches = self.collect_after_failure(makers, _Failing(9), mode=mode, n_step=60)
            check(says(error, ZeroDivisionError, "nine"), f"the policy's error must be reported, got {error!r}")
            self._check_kept(batches)
            if self.keeps_steps:
                # Eight decisions for at least one environment, with at most one step in flight per environment.
                steps = sum(map(len, batches))
                check(steps >= 6, f"at least 6 steps must be kept, got {steps}")

    def test_values_that_no_column_can_hold_are_refused(self) -> None:
        """Values that storage would change raise an error that names the column; earlier steps are intact."""
        for mode in self.modes:
            makers = [partial(ladder, 0, 5), partial(ladder, 1, 5, odd_at=9)]
            error, batches = self.collect_after_failure(makers, climb, mode=mode, n_step=60)
            check(says(error, SampleBatchError, "obs'"), f"the column must be named, got {error!r}")
            self._check_kept(batches, 8)

    def _check_kept(self, batches: list[SampleBatch], minimum: int = 0) -> None:
        streams = by_stream([batch for batch in batches if len(batch)])
        for steps in streams.values():
            check_ladder(steps, [5, 5])
            check_steps(steps)
        if self.keeps_steps:
            count = len(streams[1, 0]) if (1, 0) in streams else 0
            check(count >= minimum, f"at least {minimum} steps of environment 1 must be kept, got {count}")


def check_ladder(batch: SampleBatch, lengths: Sequence[int], *, truncates: bool = False) -> None:
    """Check every row of `ladder` environments; environment k has number k and episodes of `lengths[k]` steps.

    Raises AssertionError if a value differs from the value that the environment must return in this step.
    """
    obs, new_obs = np.asarray(batch["obs"]), np.asarray(batch["new_obs"])
    check(
        obs.dtype == new_obs.dtype == np.float32, f"observations must be float32, got {obs.dtype} and {new_obs.dtype}"
    )
    number, _, step = obs.T
    check(np.array_equal(batch["env_id"], number), "column 'env_id' must be the number of the environment")
    check(
        np.array_equal(new_obs, obs + np.array([0, 0, 1])),
        "column 'new_obs' must be what the step led to, also at the end",
    )
    check(np.array_equal(batch["t"], step), "column 't' must be the number of the step in its episode")
    check(
        np.array_equal(batch["rewards"], 100 * number + step + 1), "column 'rewards' must have the reward of the step"
    )
    check(np.array_equal(batch["actions"], step % 3), "column 'actions' must have the actions of the policy")
    over = step + 1 == np.asarray(lengths)[number.astype(int)]
    ends = (batch["truncateds"], batch["terminateds"]) if truncates else (batch["terminateds"], batch["truncateds"])
    check(np.array_equal(ends[0], over), "the last step of an episode must be marked with its kind of end")
    check(not ends[1].any(), "no step must be marked with the other kind of end")
    check((batch["agent_index"] == 0).all(), "column 'agent_index' must be 0 for one agent")


def _ladders(*, truncates: bool = False) -> list[Callable[[], Any]]:
    return [partial(ladder, number, length, truncates=truncates) for number, length in enumerate(_LENGTHS)]


def _telling(obs: Any) -> dict[str, Any]:
    """Return integer value estimates while all environments are in their first step, floats afterwards."""
    first = obs[:, 2] == 0
    values = np.where(first, 7, obs[:, 2] + 0.5)
    return {"act": climb(obs), "vf_preds": np.full(len(obs), 7) if first.all() else values.astype(np.float64)}


class _Failing:
    """Policy that raises an error in the n-th call."""

    def __init__(self, n: int) -> None:
        self._left = n

    def __call__(self, obs: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise ZeroDivisionError("nine is too many")
        return climb(obs)


def _alike(left: Any, right: Any) -> bool:
    """Return whether two sequences are equal up to the length of the shorter sequence, which must not be empty."""
    length = min(len(left), len(right))
    return bool(length) and np.array_equal(left[:length], right[:length])

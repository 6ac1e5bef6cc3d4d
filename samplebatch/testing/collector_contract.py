"""Contract of collectors for one agent: one suite that each of them passes, in every autoreset mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import SampleBatchError
from samplebatch.testing.environments import RungError, ladder, walk
from samplebatch.testing.steps import by_stream, check, check_steps, number_rows, says

Makers = Sequence[Callable[[], Any]]
"""Functions that make one environment each."""

_LENGTHS = (2, 5, 9)


def climb(obs: Any) -> Any:
    """Act as the third number of an observation of `ladder` says."""
    return (obs[:, 2] % 3).astype(np.int64)


def stay(obs: Any) -> Any:
    """Always take action 0."""
    return np.zeros(len(obs), np.int64)


class CollectorContract(ABC):
    """Tests of a collector for one agent, for authors of collectors and environment adapters.

    Derive a test class from it, and say how to collect. pytest, and every other runner that calls methods named
    `test_*`, then finds the tests.

    Attributes
    ----------
    modes
        The autoreset modes to test, as Gymnasium's `AutoresetMode` names them.
    keeps_steps
        Whether steps made before a failure are handed out by a later call.

    Examples
    --------
    >>> from gymnasium.vector import AutoresetMode, SyncVectorEnv
    >>> from samplebatch.rollout.collector import Collector
    >>> class TestCollector(CollectorContract):
    ...     def collect(self, makers, policy, *, mode, n_step=None, n_episode=None, times=1, **given):
    ...         env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))
    ...         with Collector(policy, env, **given) as collector:
    ...             return [collector.collect(n_step=n_step, n_episode=n_episode).batch for _ in range(times)]
    ...
    ...     def collect_after_failure(self, makers, policy, *, mode, n_step):
    ...         with Collector(policy, SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))) as collector:
    ...             try:
    ...                 return AssertionError("nothing was raised"), [collector.collect(n_step=n_step).batch]
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
        """Make a collector and let it collect.

        Parameters
        ----------
        makers
            Functions that make one environment each.
        policy
            A function of observations.
        mode
            The autoreset mode.
        n_step, n_episode
            Steps or episodes of every call; one of the two.
        times
            Calls, one after the other.
        seed, hooks
            As collectors take them.

        Returns
        -------
        The batch of every call.
        """

    @abstractmethod
    def collect_after_failure(
        self, makers: Makers, policy: Any, *, mode: str, n_step: int
    ) -> tuple[BaseException, list[SampleBatch]]:
        """Let a collector collect until it raises, and return the error and all steps it hands out then or later."""

    # -- what every batch is -------------------------------------------------------------------------------------------

    def test_every_row_is_a_step_that_was_made(self) -> None:
        """Rows hold the environment's values, in all modes: no reset is a step, and no last observation is lost."""
        for mode in self.modes:
            for truncates in (False, True):
                (batch,) = self.collect(_ladders(truncates=truncates), climb, mode=mode, n_step=50)
                check_ladder(batch, _LENGTHS, truncates=truncates)

    def test_steps_of_an_environment_lie_together(self) -> None:
        """Environments come in the order of their numbers, each in one piece and in time order."""
        for mode in self.modes:
            (batch,) = self.collect(_ladders(), climb, mode=mode, n_step=50)
            check_steps(batch)
            check((np.diff(batch["env_id"]) >= 0).all(), "environments must come in the order of their 'env_id'")

    def test_episodes_go_on_in_the_next_call(self) -> None:
        """Batches follow on each other without a gap, and an episode keeps its id."""
        for mode in self.modes:
            batches = self.collect(_ladders(), climb, mode=mode, n_step=12, times=4)
            check(len(batches) == 4, f"4 calls must give 4 batches, got {len(batches)}")
            for steps in by_stream(batches).values():
                check_steps(steps)
                check(steps["t"][0] == 0, "the first step must be the first of its episode")

    def test_a_single_environment_is_collected_alike(self) -> None:
        """One environment is no special case."""
        for mode in self.modes:
            batches = self.collect([partial(ladder, 0, 5)], climb, mode=mode, n_step=7, times=2)
            check([len(batch) for batch in batches] == [7, 7], "one environment must make exactly n_step steps")
            for batch in batches:
                check_ladder(batch, [5])
                check_steps(batch)

    # -- how much ------------------------------------------------------------------------------------------------------

    def test_as_many_steps_as_asked(self) -> None:
        """At least n_step, and less than one more of every environment."""
        for mode in self.modes:
            for n_step in (1, 3, 10):
                (batch,) = self.collect(_ladders(), climb, mode=mode, n_step=n_step)
                made = len(batch)
                check(n_step <= made < n_step + len(_LENGTHS), f"n_step={n_step} must give about that many, got {made}")

    def test_exactly_as_many_episodes_as_asked(self) -> None:
        """Every episode that is kept is whole, and long ones are as likely as short ones."""
        for mode in self.modes:
            for n_episode in (1, 3, 7):
                (batch,) = self.collect(_ladders(), climb, mode=mode, n_episode=n_episode)
                check_ladder(batch, _LENGTHS)
                check_steps(batch)
                ends = int((batch["terminateds"] | batch["truncateds"]).sum())
                check(ends == n_episode, f"n_episode={n_episode} must give exactly that many, got {ends}")
                kept = len(np.unique(batch["eps_id"]))
                check(kept == n_episode, f"all steps must be of the {n_episode} episodes that end, got {kept} episodes")
                if n_episode == len(_LENGTHS):
                    lengths = np.sort(np.unique(batch["eps_id"], return_counts=True)[1]).tolist()
                    check(lengths == list(_LENGTHS), f"each environment must give an episode, got lengths {lengths}")

    # -- seeds ---------------------------------------------------------------------------------------------------------

    def test_the_same_seed_gives_the_same_data(self) -> None:
        """Data follow from the seed, `eps_id` aside; another seed gives others."""
        for mode in self.modes:
            one, same, other = (self._walked(mode, seed) for seed in (3, 3, 4))
            check(one.keys() == same.keys(), "the same seed must give the same environments")
            for key, rewards in one.items():
                check(_alike(rewards, same[key]), f"the same seed must give the same data, env_id {key[0]} differs")
            check(not all(_alike(rewards, other[key]) for key, rewards in one.items()), "another seed must give others")

    def test_environments_are_unlike_each_other(self) -> None:
        """Each has a seed of its own, and its generator runs on from episode to episode."""
        for mode in self.modes:
            walked = self._walked(mode, 3)
            check(not _alike(walked[0, 0], walked[1, 0]), "environments must have a seed each")
            values = np.concatenate(list(walked.values()))
            check(len(np.unique(values)) == len(values), "no two episodes must draw the same numbers")

    def test_data_do_not_depend_on_how_many_environments_there_are(self) -> None:
        """The data of an environment follow from the seed and its number."""
        for mode in self.modes:
            few, many = self._walked(mode, 3), self._walked(mode, 3, count=5)
            for key, rewards in few.items():
                check(_alike(rewards, many[key]), f"env_id {key[0]} must not depend on the number of environments")

    def _walked(self, mode: str, seed: int, count: int = 3) -> dict[tuple[int, int], Any]:
        batches = self.collect([walk] * count, stay, mode=mode, n_step=30 * count, seed=seed)
        return {key: np.asarray(steps["rewards"]) for key, steps in by_stream(batches).items()}

    # -- infos, hooks, columns -----------------------------------------------------------------------------------------

    def test_infos_belong_to_their_step(self) -> None:
        """Every row has the info of its own step, that of a last step included."""
        for mode in self.modes:
            (batch,) = self.collect(_ladders(), climb, mode=mode, n_step=50)
            steps = np.asarray(batch["obs"])[:, 2] + 1
            found = [info.get("step") for info in batch["infos"].tolist()]
            check(found == steps.tolist(), "column 'infos' must hold the info of each row's own step")

    def test_hooks_see_every_trajectory_once(self) -> None:
        """A hook is called on the steps that a batch has of each episode, and may add columns."""
        for mode in self.modes:
            (batch,) = self.collect(_ladders(), climb, mode=mode, n_step=50, hooks=[number_rows])
            places = np.asarray(batch["place"])
            _, first, counts = np.unique(batch["eps_id"], return_index=True, return_counts=True)
            for start, count in zip(first.tolist(), counts.tolist(), strict=True):
                own = places[start : start + count].tolist()
                check(own == list(range(count)), "a hook must see the steps of an episode together and in order")

    def test_columns_of_the_policy_are_kept_and_widened(self) -> None:
        """Extra outputs of a policy are kept with its step; a wider dtype in a later step loses nothing."""
        for mode in self.modes:
            (batch,) = self.collect(_ladders(), _telling, mode=mode, n_step=50)
            check(batch["vf_preds"].dtype == np.float64, "a column of integers must widen to floats")
            expected = np.where(batch["obs"][:, 2] == 0, 7.0, batch["obs"][:, 2] + 0.5)
            check(np.array_equal(batch["vf_preds"], expected), "column 'vf_preds' must hold what the policy said")

    # -- failures ------------------------------------------------------------------------------------------------------

    def test_an_environment_that_raises_costs_no_step_before(self) -> None:
        """Steps that were made before a failure are right, and follow on each other."""
        for mode in self.modes:
            makers = [partial(ladder, 0, 5), partial(ladder, 1, 5, fails_at=9)]
            error, batches = self.collect_after_failure(makers, climb, mode=mode, n_step=60)
            check(says(error, RungError, "the rung broke"), f"the environment's own error must be told, got {error!r}")
            self._check_kept(batches, 8)

    def test_a_policy_that_raises_costs_no_step_before(self) -> None:
        """As for environments."""
        for mode in self.modes:
            makers = [partial(ladder, 0, 5), partial(ladder, 1, 5)]
            error, batches = self.collect_after_failure(makers, _Failing(9), mode=mode, n_step=60)
            check(says(error, ZeroDivisionError, "nine"), f"the policy's own error must be told, got {error!r}")
            self._check_kept(batches)
            if self.keeps_steps:
                # Eight decisions for one environment or more, and in flight at most one step of each of the two.
                steps = sum(map(len, batches))
                check(steps >= 6, f"at least 6 steps must be kept, got {steps}")

    def test_values_that_no_column_can_hold_are_refused(self) -> None:
        """A value that would change is refused by column and step, and the steps before it are kept whole."""
        for mode in self.modes:
            makers = [partial(ladder, 0, 5), partial(ladder, 1, 5, odd_at=9)]
            error, batches = self.collect_after_failure(makers, climb, mode=mode, n_step=60)
            check(says(error, SampleBatchError, "obs'"), f"the column must be named, got {error!r}")
            self._check_kept(batches, 8)

    def _check_kept(self, batches: list[SampleBatch], least: int = 0) -> None:
        kept = by_stream([batch for batch in batches if len(batch)])
        for steps in kept.values():
            check_ladder(steps, [5, 5])
            check_steps(steps)
        if self.keeps_steps:
            found = len(kept[1, 0]) if (1, 0) in kept else 0
            check(found >= least, f"at least {least} steps of environment 1 must be kept, got {found}")


def check_ladder(batch: SampleBatch, lengths: Sequence[int], *, truncates: bool = False) -> None:
    """Check every row against the rules of `ladder`, where environment k has number k and episodes of `lengths[k]`.

    Raises
    ------
    AssertionError
        If a value is not the one that the environment gave.
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
    check(np.array_equal(batch["rewards"], 100 * number + step + 1), "column 'rewards' must be that of the step")
    check(np.array_equal(batch["actions"], step % 3), "column 'actions' must be what the policy decided")
    over = step + 1 == np.asarray(lengths)[number.astype(int)]
    ends = (batch["truncateds"], batch["terminateds"]) if truncates else (batch["terminateds"], batch["truncateds"])
    check(np.array_equal(ends[0], over), "an episode must end with its last step, and be marked as it ended")
    check(not ends[1].any(), "no step must be marked as the end that it is not")
    check((batch["agent_index"] == 0).all(), "column 'agent_index' must be 0 for one agent")


def _ladders(*, truncates: bool = False) -> list[Callable[[], Any]]:
    return [partial(ladder, number, length, truncates=truncates) for number, length in enumerate(_LENGTHS)]


def _telling(obs: Any) -> dict[str, Any]:
    """Say integers as long as all environments are in their first step, floats after that."""
    first = obs[:, 2] == 0
    values = np.where(first, 7, obs[:, 2] + 0.5)
    return {"act": climb(obs), "vf_preds": np.full(len(obs), 7) if first.all() else values.astype(np.float64)}


class _Failing:
    """A policy that raises when it is asked for the n-th time."""

    def __init__(self, n: int) -> None:
        self._left = n

    def __call__(self, obs: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise ZeroDivisionError("nine is too many")
        return climb(obs)


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two sequences are the same as far as both go."""
    length = min(len(one), len(other))
    return bool(length) and np.array_equal(one[:length], other[:length])

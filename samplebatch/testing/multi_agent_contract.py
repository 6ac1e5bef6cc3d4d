"""Test suite of multi-agent collectors, for agents that act simultaneously or in turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import SampleBatchError
from samplebatch.testing.environments import Market, Relay, RungError, by_stream, check, check_steps, number_rows, says

Makers = Sequence[Callable[[], Any]]
"""Functions that each create an environment."""

EPS_DONE = "eps_done"


def by_turn(obs: Any) -> Any:
    """Return one action per observation: the first element of the observation, modulo 4."""
    return (obs[:, 0] % 4).astype(np.int64)


def everyone(agent: Any) -> str:
    """Map every agent to one policy."""
    return "all"


def each(agent: Any) -> str:
    """Map every agent to its own policy."""
    return str(agent)


class MultiAgentContract(ABC):
    """Test suite of a multi-agent collector, for authors of collectors and environment adapters.

    Derive a test class and implement the abstract methods. pytest and other runners that call methods named `test_*`
    run the tests.

    Attributes
    ----------
    keeps_steps
        Whether steps completed before a failure are returned by a later call.
    """

    keeps_steps = True

    @abstractmethod
    def collect(
        self,
        makers: Makers,
        policies: Any,
        *,
        policy_mapping: Callable[[Any], str] = everyone,
        n_step: int | None = None,
        n_episode: int | None = None,
        times: int = 1,
        seed: int | None = None,
        hooks: Sequence[Any] = (),
    ) -> list[MultiAgentBatch]:
        """Create a collector and call its method `collect`, once or several times.

        Parameters
        ----------
        makers, times, seed, hooks
            As in `CollectorContract.collect`.
        policies
            A function of observations or `"random"` for all policies, or a mapping from policy ids to these values.
        policy_mapping
            Function from agent ids to policy ids.
        n_step, n_episode
            Number of environment steps, or of episodes, per call; exactly one of both is passed.

        Returns
        -------
        List of the batches that the calls returned, in order of the calls.
        """

    @abstractmethod
    def collect_after_failure(
        self, makers: Makers, policies: Any, *, n_step: int
    ) -> tuple[BaseException, list[MultiAgentBatch]]:
        """Collect until an error is raised; return the error and all steps that were returned before and after it.

        `everyone` maps all agents to one policy.
        """

    # -- agents that act simultaneously --------------------------------------------------------------------------------

    def test_every_row_is_a_step_that_was_made(self) -> None:
        """Rows contain the environment's values even if agents join and leave."""
        for count in (1, 3):
            (batch,) = self.collect([Relay] * count, by_turn, n_step=3 * Relay.length * count)
            check_relay(batch["all"])
            check_steps(batch["all"])
            count_of_steps = len(batch["all"])
            check(
                count_of_steps == 3 * Relay.rows * count,
                f"each episode must have {Relay.rows} agent steps, got {count_of_steps} in total",
            )

    def test_exactly_as_many_environment_steps_as_asked(self) -> None:
        """A batch has the requested number of environment steps, including the rows of all agents that acted."""
        for makers, check_rows in (([Relay] * 2, check_relay), ([Market] * 2, check_market)):
            batches = self.collect(makers, by_turn, n_step=10, times=4)
            check(
                [batch.count for batch in batches] == [10] * 4, "each batch must have exactly n_step environment steps"
            )
            for batch in batches:
                check_rows(batch["all"])
                stepped = {*zip(batch["all"]["env_id"], batch["all"]["eps_id"], batch["all"]["t"], strict=True)}
                check(len(stepped) == 10, f"the rows must be of 10 environment steps, got {len(stepped)}")

    def test_episodes_go_on_in_the_next_call(self) -> None:
        """There are no gaps between successive batches, and an episode has the same id in all batches."""
        for makers, together in (([Relay] * 2, True), ([Market] * 2, False)):
            batches = self.collect(makers, by_turn, n_step=10, times=4)
            for steps in by_stream([batch["all"] for batch in batches]).values():
                check_steps(steps, together=together)

    def test_exactly_as_many_episodes_as_asked(self) -> None:
        """Every episode contains all steps of all its agents."""
        for make, check_rows in ((Relay, check_relay), (Market, check_market)):
            for n_episode in (1, 2, 5):
                (batch,) = self.collect([make] * 2, by_turn, n_episode=n_episode)
                rows = batch["all"]
                check_rows(rows)
                episodes = len(np.unique(rows["eps_id"]))
                check(episodes == n_episode, f"n_episode={n_episode} must give exactly that many, got {episodes}")
                check(len(rows) == make.rows * n_episode, "every episode must be complete for all its agents")
                check(batch.count == make.length * n_episode, "'count' must be the number of environment steps")

    def test_the_last_step_of_an_episode_is_marked(self) -> None:
        """`eps_done` is true for all agents that act in the last step of an episode, and false in all other rows."""
        for make in (Relay, Market):
            (batch,) = self.collect([make], by_turn, n_step=3 * make.length)
            rows = batch["all"]
            check(
                np.array_equal(rows[EPS_DONE], rows["t"] == make.length - 1), "'eps_done' must mark only the last step"
            )

    def test_each_agent_has_the_policy_of_the_mapping(self) -> None:
        """Steps are in the batch of the agent's policy, and environment steps are counted once for all policies."""
        for make in (Relay, Market):
            (batch,) = self.collect([make], by_turn, policy_mapping=each, n_episode=2)
            check(sorted(batch.policy_batches) == sorted(make.possible_agents), "each policy must have a batch")
            for policy_id, steps in batch.policy_batches.items():
                check((steps["agent_index"] == int(policy_id[-1])).all(), "a policy must have the steps of its agents")

    # -- agents that act in turns --------------------------------------------------------------------------------------

    def test_turns_are_kept_as_they_were_played(self) -> None:
        """A row contains the result of a turn at the agent's next turn, including rewards from turns in between."""
        (batch,) = self.collect([Market], by_turn, n_episode=2)
        rows = batch["all"]
        check_market(rows)
        check_steps(rows, together=False)
        for eps_id in np.unique(rows["eps_id"]):
            check(int((rows["eps_id"] == eps_id).sum()) == Market.length, "every turn of a living agent must be a row")

    # -- seeds, hooks, columns -----------------------------------------------------------------------------------------

    def test_the_same_seed_gives_the_same_actions(self) -> None:
        """Random actions depend on the seed, but not on the number of environments."""
        for make in (Relay, Market):
            first, same, other = (self._actions(make, seed) for seed in (3, 3, 4))
            check(all(np.array_equal(first[key], same[key]) for key in first), "the same seed must give the same data")
            check(
                not all(np.array_equal(first[key], other[key]) for key in first),
                "another seed must give different data",
            )
            many = self._actions(make, 3, count=4)
            check(
                all(np.array_equal(first[key], many[key]) for key in first),
                "data must not depend on other environments",
            )

    def _actions(self, make: Callable[[], Any], seed: int, count: int = 2) -> dict[tuple[int, int], Any]:
        (batch,) = self.collect([make] * count, "random", n_step=40 * count, seed=seed)
        return {key: np.asarray(steps["actions"]) for key, steps in by_stream([batch["all"]]).items()}

    def test_hooks_see_every_trajectory_once(self) -> None:
        """A hook is called once per agent and episode in each batch, and may add columns."""
        for make in (Relay, Market):
            (batch,) = self.collect([make] * 2, by_turn, n_step=30, hooks=[number_rows])
            rows = batch["all"]
            keys = np.stack([rows["eps_id"], rows["agent_index"]])
            for key in np.unique(keys, axis=1).T:
                offsets = np.asarray(rows["place"])[(keys == key[:, None]).all(0)].tolist()
                check(offsets == list(range(len(offsets))), "a hook must be called with all steps of an agent in order")

    def test_columns_of_the_policy_are_kept_and_widened(self) -> None:
        """A policy's additional outputs are stored with the agent's step; wider dtypes are stored without rounding."""
        for make in (Relay, Market):
            (batch,) = self.collect([make], _telling, n_step=30)
            rows = batch["all"]
            first = rows["obs"][:, 0] < 2
            expected = np.where(first, 7.0, rows["obs"][:, 0] + 0.5)
            check(rows["vf_preds"].dtype == np.float64, "a column of integers must widen to floats")
            check(
                np.array_equal(rows["vf_preds"], expected),
                "column 'vf_preds' must contain the policy's value estimates",
            )

    # -- failures ------------------------------------------------------------------------------------------------------

    def test_an_environment_that_raises_costs_no_step_before(self) -> None:
        """Steps completed before a failure are correct and have no gaps."""
        for make, check_rows in ((Relay, check_relay), (Market, check_market)):
            error, batches = self.collect_after_failure([make, partial(make, fails_at=13)], by_turn, n_step=60)
            check(says(error, RungError, "broke") or says(error, RungError, "dropped"), f"got {error!r}")
            self._check_kept(batches, check_rows, together=make is Relay)

    def test_values_that_no_column_can_hold_are_refused(self) -> None:
        """Values that storage would change raise an error that names the column; earlier steps are intact."""
        for make, check_rows in ((Relay, check_relay), (Market, check_market)):
            error, batches = self.collect_after_failure([make, partial(make, odd_at=13)], by_turn, n_step=60)
            check(says(error, SampleBatchError, "'rewards'"), f"the column must be named, got {error!r}")
            self._check_kept(batches, check_rows, together=make is Relay)

    def _check_kept(
        self, batches: list[MultiAgentBatch], check_rows: Callable[[SampleBatch], None], *, together: bool
    ) -> None:
        streams = by_stream([batch["all"] for batch in batches if len(batch.policy_batches)])
        for steps in streams.values():
            check_rows(steps)
            check_steps(steps, together=together)
        if self.keeps_steps:
            minimum = 6
            steps_by_env = {
                env_id: sum(len(steps) for key, steps in streams.items() if key[0] == env_id) for env_id in (0, 1)
            }
            check(
                min(steps_by_env.values()) >= minimum,
                f"at least {minimum} agent steps per environment must be stored, got {steps_by_env}",
            )


def check_relay(rows: SampleBatch) -> None:
    """Check every row against the rules of `Relay`, with actions of `by_turn`.

    Raises AssertionError if a value differs from the value that the environment returns.
    """
    obs, new_obs = np.asarray(rows["obs"]), np.asarray(rows["new_obs"])
    check(
        obs.dtype == new_obs.dtype == np.float32, f"observations must be float32, got {obs.dtype} and {new_obs.dtype}"
    )
    step, runner = obs.T
    check(np.array_equal(rows["agent_index"], runner), "column 'agent_index' must be the number of the agent")
    check(np.array_equal(rows["t"], step), "column 't' must be the number of the environment step in its episode")
    check(
        np.array_equal(new_obs, obs + np.array([1, 0])),
        "column 'new_obs' must have the next observation, also for agents that leave",
    )
    check(np.array_equal(rows["rewards"], 100 * step + runner), "column 'rewards' must have the agent's rewards")
    check(np.array_equal(rows["actions"], step % 4), "column 'actions' must have the actions of the policy")
    check(((step >= 2 * runner) & (step <= 2 * runner + 3)).all(), "an agent must have steps from joining to leaving")
    check(
        np.array_equal(rows["terminateds"], step == 2 * runner + 3),
        "an agent that leaves must be terminated in its last step",
    )
    check(not rows["truncateds"].any(), "no step must be truncated")
    check(
        [info["now"] for info in rows["infos"].tolist()] == step.tolist(),
        "column 'infos' must have the info of the step",
    )


def check_market(rows: SampleBatch) -> None:
    """Check every row against an episode of `Market` by `play_by_the_book`, with actions of `by_turn`.

    Raises AssertionError if a value differs from the value that the environment returns.
    """
    played = play_by_the_book(Market(), lambda obs: int(obs[0] % 4))
    for row in range(len(rows)):
        expected = played[int(rows["t"][row])]
        for name, value in expected.items():
            actual = rows[name][row]
            check(
                np.array_equal(actual, value),
                f"column {name!r} must have the values of the played episode, in turn {rows['t'][row]}",
            )


def play_by_the_book(environment: Any, act: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Play one episode of a turn-based environment with PettingZoo's documented loop; record turns of living agents.

    environment: the environment; only `last` and `step` are called.
    act: function from an observation to an action.

    Returns: one dict of values by column name, without ids, per turn of a living agent, in order.
    """
    environment.reset()
    rows: list[dict[str, Any]] = []
    waiting: dict[Any, dict[str, Any]] = {}
    early: dict[Any, float] = {}
    indices = {agent: index for index, agent in enumerate(environment.possible_agents)}
    while environment.agents:
        agent = environment.agent_selection
        obs, reward, terminated, truncated, info = environment.last()
        obs = np.array(obs)
        row = waiting.pop(agent, None)
        if row is None:
            early[agent] = reward
        else:
            row.update(new_obs=obs, rewards=reward + early.pop(agent, 0.0), infos=dict(info))
            row.update(terminateds=terminated, truncateds=truncated)
        if terminated or truncated:
            environment.step(None)
            continue
        action = act(obs)
        waiting[agent] = {"obs": obs, "actions": action, "agent_index": indices[agent]}
        rows.append(waiting[agent])
        environment.step(action)
    return rows


def _telling(obs: Any) -> dict[str, Any]:
    """Return integer value estimates in the first two turns, floats afterwards."""
    first = obs[:, 0] < 2
    values = np.where(first, 7, obs[:, 0] + 0.5)
    return {"act": by_turn(obs), "vf_preds": np.full(len(obs), 7) if first.all() else values.astype(np.float64)}

"""Contract of collectors for several agents: one suite for agents that act together or in turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import SampleBatchError
from samplebatch.testing.environments import Market, Relay, RungError
from samplebatch.testing.steps import by_stream, check, check_steps, number_rows, says

Makers = Sequence[Callable[[], Any]]
"""Functions that make one environment each."""

EPS_DONE = "eps_done"


def by_turn(obs: Any) -> Any:
    """Act as the first number of an observation says."""
    return (obs[:, 0] % 4).astype(np.int64)


def everyone(agent: Any) -> str:
    """Map every agent to one policy."""
    return "all"


def each(agent: Any) -> str:
    """Map every agent to a policy of its own."""
    return str(agent)


class MultiAgentContract(ABC):
    """Tests of a collector for several agents, for authors of collectors and environment adapters.

    Derive a test class from it, and say how to collect. pytest, and every other runner that calls methods named
    `test_*`, then finds the tests.

    Attributes
    ----------
    keeps_steps
        Whether steps made before a failure are handed out by a later call.
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
        """Make a collector and let it collect.

        Parameters
        ----------
        makers
            Functions that make one environment each.
        policies
            A function of observations for all policies, `"random"`, or a mapping by policy id.
        policy_mapping
            The policy of an agent.
        n_step, n_episode
            Environment steps or episodes of every call; one of the two.
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
        self, makers: Makers, policies: Any, *, n_step: int
    ) -> tuple[BaseException, list[MultiAgentBatch]]:
        """Let a collector collect until it raises, and return the error and all steps it hands out then or later.

        All agents have the policy of `everyone`.
        """

    # -- agents who act together ---------------------------------------------------------------------------------------

    def test_every_row_is_a_step_that_was_made(self) -> None:
        """Rows hold the environment's values, also where agents come and go."""
        for count in (1, 3):
            (batch,) = self.collect([Relay] * count, by_turn, n_step=3 * Relay.length * count)
            check_relay(batch["all"])
            check_steps(batch["all"])
            made = len(batch["all"])
            check(made == 3 * Relay.rows * count, f"{Relay.rows} agent steps an episode were made, got {made} in all")

    def test_exactly_as_many_environment_steps_as_asked(self) -> None:
        """A batch has the steps that were asked for, of all agents that acted in them."""
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
        """Batches follow on each other without a gap, and an episode keeps its id."""
        for makers, together in (([Relay] * 2, True), ([Market] * 2, False)):
            batches = self.collect(makers, by_turn, n_step=10, times=4)
            for steps in by_stream([batch["all"] for batch in batches]).values():
                check_steps(steps, together=together)

    def test_exactly_as_many_episodes_as_asked(self) -> None:
        """Every episode is whole, for all its agents."""
        for make, check_rows in ((Relay, check_relay), (Market, check_market)):
            for n_episode in (1, 2, 5):
                (batch,) = self.collect([make] * 2, by_turn, n_episode=n_episode)
                rows = batch["all"]
                check_rows(rows)
                kept = len(np.unique(rows["eps_id"]))
                check(kept == n_episode, f"n_episode={n_episode} must give exactly that many, got {kept}")
                check(len(rows) == make.rows * n_episode, "every episode must be whole, for all its agents")
                check(batch.count == make.length * n_episode, "'count' must be the number of environment steps")

    def test_the_last_step_of_an_episode_is_marked(self) -> None:
        """`eps_done` marks the last step of an episode for all agents that act in it, and no other."""
        for make in (Relay, Market):
            (batch,) = self.collect([make], by_turn, n_step=3 * make.length)
            rows = batch["all"]
            check(
                np.array_equal(rows[EPS_DONE], rows["t"] == make.length - 1), "'eps_done' must mark the last step alone"
            )

    def test_each_agent_has_the_policy_of_the_mapping(self) -> None:
        """Steps go to the batch of the agent's policy; all have one number of environment steps."""
        for make in (Relay, Market):
            (batch,) = self.collect([make], by_turn, policy_mapping=each, n_episode=2)
            check(sorted(batch.policy_batches) == sorted(make.possible_agents), "each policy must have a batch")
            for policy_id, steps in batch.policy_batches.items():
                check((steps["agent_index"] == int(policy_id[-1])).all(), "a policy must have its own agents' steps")

    # -- agents who take turns -----------------------------------------------------------------------------------------

    def test_turns_are_kept_as_they_were_played(self) -> None:
        """A row holds the outcome of a turn until the agent's next: rewards of the others' turns, last observations."""
        (batch,) = self.collect([Market], by_turn, n_episode=2)
        rows = batch["all"]
        check_market(rows)
        check_steps(rows, together=False)
        for eps_id in np.unique(rows["eps_id"]):
            check(int((rows["eps_id"] == eps_id).sum()) == Market.length, "every turn of a living agent must be a row")

    # -- seeds, hooks, columns -----------------------------------------------------------------------------------------

    def test_the_same_seed_gives_the_same_actions(self) -> None:
        """Random actions follow from the seed, and not from the number of environments."""
        for make in (Relay, Market):
            one, same, other = (self._actions(make, seed) for seed in (3, 3, 4))
            check(all(np.array_equal(one[key], same[key]) for key in one), "the same seed must give the same data")
            check(not all(np.array_equal(one[key], other[key]) for key in one), "another seed must give others")
            many = self._actions(make, 3, count=4)
            check(all(np.array_equal(one[key], many[key]) for key in one), "data must not depend on other environments")

    def _actions(self, make: Callable[[], Any], seed: int, count: int = 2) -> dict[tuple[int, int], Any]:
        (batch,) = self.collect([make] * count, "random", n_step=40 * count, seed=seed)
        return {key: np.asarray(steps["actions"]) for key, steps in by_stream([batch["all"]]).items()}

    def test_hooks_see_every_trajectory_once(self) -> None:
        """A hook is called on the steps that a batch has of each agent in each episode, and may add columns."""
        for make in (Relay, Market):
            (batch,) = self.collect([make] * 2, by_turn, n_step=30, hooks=[number_rows])
            rows = batch["all"]
            keys = np.stack([rows["eps_id"], rows["agent_index"]])
            for key in np.unique(keys, axis=1).T:
                own = np.asarray(rows["place"])[(keys == key[:, None]).all(0)].tolist()
                check(own == list(range(len(own))), "a hook must see an agent's steps of an episode together, in order")

    def test_columns_of_the_policy_are_kept_and_widened(self) -> None:
        """Extra outputs of a policy are kept with the agent's step; a wider dtype in a later step loses nothing."""
        for make in (Relay, Market):
            (batch,) = self.collect([make], _telling, n_step=30)
            rows = batch["all"]
            first = rows["obs"][:, 0] < 2
            expected = np.where(first, 7.0, rows["obs"][:, 0] + 0.5)
            check(rows["vf_preds"].dtype == np.float64, "a column of integers must widen to floats")
            check(np.array_equal(rows["vf_preds"], expected), "column 'vf_preds' must hold what the policy said")

    # -- failures ------------------------------------------------------------------------------------------------------

    def test_an_environment_that_raises_costs_no_step_before(self) -> None:
        """Complete steps that were made before a failure are right, and follow on each other."""
        for make, check_rows in ((Relay, check_relay), (Market, check_market)):
            error, batches = self.collect_after_failure([make, partial(make, fails_at=13)], by_turn, n_step=60)
            check(says(error, RungError, "broke") or says(error, RungError, "dropped"), f"got {error!r}")
            self._check_kept(batches, check_rows, together=make is Relay)

    def test_values_that_no_column_can_hold_are_refused(self) -> None:
        """A value that would change is refused by column, and the steps before it are kept whole."""
        for make, check_rows in ((Relay, check_relay), (Market, check_market)):
            error, batches = self.collect_after_failure([make, partial(make, odd_at=13)], by_turn, n_step=60)
            check(says(error, SampleBatchError, "'rewards'"), f"the column must be named, got {error!r}")
            self._check_kept(batches, check_rows, together=make is Relay)

    def _check_kept(
        self, batches: list[MultiAgentBatch], check_rows: Callable[[SampleBatch], None], *, together: bool
    ) -> None:
        kept = by_stream([batch["all"] for batch in batches if len(batch.policy_batches)])
        for steps in kept.values():
            check_rows(steps)
            check_steps(steps, together=together)
        if self.keeps_steps:
            least = 6
            made = {env_id: sum(len(steps) for key, steps in kept.items() if key[0] == env_id) for env_id in (0, 1)}
            check(min(made.values()) >= least, f"at least {least} agent steps an environment must be kept, got {made}")


def check_relay(rows: SampleBatch) -> None:
    """Check every row against the rules of `Relay`, with agents that act as `by_turn` says.

    Raises
    ------
    AssertionError
        If a value is not the one that the environment gave.
    """
    obs, new_obs = np.asarray(rows["obs"]), np.asarray(rows["new_obs"])
    check(
        obs.dtype == new_obs.dtype == np.float32, f"observations must be float32, got {obs.dtype} and {new_obs.dtype}"
    )
    step, runner = obs.T
    check(np.array_equal(rows["agent_index"], runner), "column 'agent_index' must be the agent's place")
    check(np.array_equal(rows["t"], step), "column 't' must be the number of the environment step in its episode")
    check(
        np.array_equal(new_obs, obs + np.array([1, 0])),
        "column 'new_obs' must be what the step led to, also for who leaves",
    )
    check(np.array_equal(rows["rewards"], 100 * step + runner), "column 'rewards' must be the agent's own")
    check(np.array_equal(rows["actions"], step % 4), "column 'actions' must be what the policy decided")
    check(((step >= 2 * runner) & (step <= 2 * runner + 3)).all(), "an agent must have steps from joining to leaving")
    check(np.array_equal(rows["terminateds"], step == 2 * runner + 3), "who leaves must be terminated in that step")
    check(not rows["truncateds"].any(), "nobody is truncated")
    check([info["now"] for info in rows["infos"].tolist()] == step.tolist(), "column 'infos' must be that of the step")


def check_market(rows: SampleBatch) -> None:
    """Check every row against an episode of `Market` that is played by the book, with actions as `by_turn` says.

    Raises
    ------
    AssertionError
        If a value is not the one that the environment gave.
    """
    played = play_by_the_book(Market(), lambda obs: int(obs[0] % 4))
    for row in range(len(rows)):
        expected = played[int(rows["t"][row])]
        for name, value in expected.items():
            found = rows[name][row]
            check(np.array_equal(found, value), f"column {name!r} must be as it was played, in turn {rows['t'][row]}")


def play_by_the_book(environment: Any, act: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Play one episode of a turn-based environment as PettingZoo's manual says, and note each turn of a living agent.

    Parameters
    ----------
    environment
        The environment; `last` and `step` are used alone.
    act
        The action for an observation.

    Returns
    -------
    A row a turn, in order: columns by name, without the ids.
    """
    environment.reset()
    rows: list[dict[str, Any]] = []
    waiting: dict[Any, dict[str, Any]] = {}
    early: dict[Any, float] = {}
    places = {agent: place for place, agent in enumerate(environment.possible_agents)}
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
        waiting[agent] = {"obs": obs, "actions": action, "agent_index": places[agent]}
        rows.append(waiting[agent])
        environment.step(action)
    return rows


def _telling(obs: Any) -> dict[str, Any]:
    """Say integers as long as it is one of the first two turns, floats after that."""
    first = obs[:, 0] < 2
    values = np.where(first, 7, obs[:, 0] + 0.5)
    return {"act": by_turn(obs), "vf_preds": np.full(len(obs), 7) if first.all() else values.astype(np.float64)}

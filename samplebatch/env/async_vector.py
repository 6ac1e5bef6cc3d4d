"""AsyncEnvironments: the environments of an AsyncVectorEnv, each stepped when it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.column.exact import BOOL, FLOAT, exact_rows
from samplebatch.env.base import Environments, Flags, Floats
from samplebatch.env.environment_processes import EnvironmentProcesses
from samplebatch.env.gymnasium import check_shared
from samplebatch.env.infos import Infos, Rows, without_finals
from samplebatch.env.spaces import Columns, Leaf, column_names
from samplebatch.errors import EnvironmentSpecError, WorkerError

_RESETS: dict[str, tuple[str, Any] | None] = {
    "NextStep": ("step", None),
    "SameStep": None,
    "Disabled": ("reset", {"seed": None, "options": None}),
}
"""What a process is told after an episode ended, by autoreset mode; None where it has reset its environment itself."""


def put(leaf: Leaf, rows: Rows, values: Leaf) -> Leaf:
    """Write rows of an array, and return it; in a copy of a wider dtype where the values have one."""
    if leaf.dtype != values.dtype:
        leaf = leaf.astype(np.result_type(leaf.dtype, values.dtype))
    leaf[rows] = values
    return leaf


Outcome = tuple[Sequence[Leaf], Floats, Flags, Flags, list[dict[str, Any]]]
"""New observations by leaf, rewards, flags of termination and truncation, and infos, of k steps."""


class Answers(NamedTuple):
    """What environments answered: k of them made a step, m of them can be acted in now.

    Attributes
    ----------
    envs
        The environments that made a step, ascending, shape (k,).
    outcome
        What these steps led to; where an episode ended, its last observation. No leaves if k is 0.
    ended
        Those of the environments whose episode ended.
    ready
        The environments that can be acted in, ascending, shape (m,): those that made a step, unless they have yet to
        begin another episode, and those that have begun one.
    obs, infos
        What to act on there, and what was said with it. No leaves if m is 0.
    """

    envs: Rows
    outcome: Outcome
    ended: Rows
    ready: Rows
    obs: Sequence[Leaf]
    infos: list[dict[str, Any]]
    new_names: Sequence[str]
    """The names of the columns of new observations."""

    def columns(self, rows: Rows) -> Columns:
        """Return the columns of some of the k steps."""
        new_obs, *outcome, _ = self.outcome
        columns = {name: leaf[rows] for name, leaf in zip(self.new_names, new_obs, strict=True)}
        keys = (names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS)
        return columns | {name: values[rows] for name, values in zip(keys, outcome, strict=True)}


class AsyncEnvironments(Environments):
    """The environments of an AsyncVectorEnv, in any autoreset mode, each stepped when it is ready, or all together.

    An environment whose episode ended begins another one at once. That is no step, and nobody waits for it before the
    last step of the episode is told.

    Parameters
    ----------
    env
        The AsyncVectorEnv.

    Raises
    ------
    EnvironmentSpecError
        If it is something else, or its observations lie in shared memory from which Gymnasium does not read them anew.

    Examples
    --------
    >>> import gymnasium
    >>> environments = AsyncEnvironments(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async"))
    >>> _ = environments.reset(seeds=[1, 2])
    >>> environments.send([np.array([0])], np.array([1]))
    >>> answers = environments.wait()
    >>> answers.envs, answers.ready, answers.obs[0].shape
    (array([1]), array([1]), (1, 4))
    >>> environments.close()
    """

    def __init__(self, env: Any) -> None:
        self._processes = EnvironmentProcesses(env)
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)
        self._new_names = column_names(names.NEXT_OBS, self.observations)
        self._reset_by = _RESETS[env.autoreset_mode.value]
        self._shared: list[Leaf] | None = None
        if env.shared_memory:
            check_shared(self.observations)
            self._shared = self.observations.flatten(env.observations)
        self._resetting: set[int] = set()
        # Without shared memory, Gymnasium resets these in their next step even if it was told to reset them before.
        self._over: set[int] = set()

    @property
    def under_way(self) -> int:
        """How many environments were told to do something and have not been waited for."""
        return len(self._processes.under_way)

    def reset(
        self,
        *,
        seeds: Sequence[int] | None = None,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        **given: Any,
    ) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; what is under way is waited for, and dropped.

        Parameters
        ----------
        seeds
            A seed for each environment; None leaves their generators running.
        seed
            Takes precedence: a seed for each environment, or the first of them, from which the others count on.
        options
            What each environment is given.
        **given
            Nothing else: Gymnasium knows no more.

        Raises
        ------
        EnvironmentSpecError
            If there are not as many seeds as environments, or only some of these are to be reset, or something else is
            given.
        WorkerError
            If an environment fails.
        """
        count = self.num_envs
        numbers: Sequence[int | None] = seeds or [None] * count
        if isinstance(seed, (int, np.integer)):
            numbers = range(int(seed), int(seed) + count)
        elif seed is not None:
            numbers = seed
        if len(numbers) != count:
            raise EnvironmentSpecError(f"there must be a seed for each of {count} environments, got {len(numbers)}")
        if options and "reset_mask" in options:
            raise EnvironmentSpecError("all environments must be reset, and options have a 'reset_mask'; leave it out")
        if given:
            raise EnvironmentSpecError(f"an AsyncVectorEnv is reset by seed and options, got {next(iter(given))!r}")
        while self.under_way or self._over:
            self._begin_anew()
            self.wait(self.under_way)
        for env, number in enumerate(numbers):
            self._resetting.add(env)
            self._processes.ask(env, "reset", {"seed": number, "options": options})
        begun = self.wait(count)
        self._processes.check()
        self.made = 0
        return begun.obs, begun.infos

    def _begin_anew(self) -> None:
        """Begin an episode where one is over."""
        for env in sorted(self._over):
            self._resetting.add(env)
            self._processes.ask(env, *(self._reset_by or ()))
            self._over.discard(env)

    def send(self, actions: Sequence[Leaf], envs: Rows) -> None:
        """Let environments that are ready make a step.

        Parameters
        ----------
        actions
            The leaves of the actions, each of shape (k, ...).
        envs
            The environments, shape (k,).

        Raises
        ------
        WorkerError
            If an environment has failed.
        """
        nest, ask = self.actions.nest, self._processes.ask
        for row, env in enumerate(envs.tolist()):
            ask(env, "step", nest([leaf[row] for leaf in actions]))

    def wait(
        self, least: int = 1, timeout_s: float | None = None, among: npt.NDArray[np.bool_] | None = None
    ) -> Answers:
        """Wait for environments that are under way, and return what all of them answered that are done.

        Parameters
        ----------
        least
            How many to wait for; if fewer are under way, for all of these.
        timeout_s
            Seconds after which fewer do, if it is one at least.
        among
            Whether to wait for each environment, shape (num_envs,): others stay under way. None for all.

        Raises
        ------
        WorkerError
            If an environment failed, or its process ended; what others answered is returned before.
        """
        given = self._processes.receive(least, timeout_s, among)
        begun = [(env, answer) for env, answer in given if env in self._resetting]
        steps = [(env, answer) for env, answer in given if env not in self._resetting]
        envs = np.array([env for env, _ in steps], np.intp)
        self.made += bool(steps)
        outcome = self._outcome(envs, [answer for _, answer in steps])
        ended = envs[outcome[2] | outcome[3]].tolist()
        if self._reset_by is not None:
            self._over.update(ended)
        self._resetting.difference_update([env for env, _ in begun])
        following = {env: (answer[0], answer[-1]) for env, answer in begun}
        if ended or begun:
            for env, (obs, *_, info) in steps:
                if env not in self._over:
                    following[env] = obs, without_finals(info) if env in ended else info
            ready = np.array(sorted(following), np.intp)
            obs, infos = zip(*[following[env] for env in ready.tolist()], strict=True) if following else ((), ())
            answers = Answers(
                envs, outcome, np.array(ended, np.intp), ready, self._leaves(ready, obs), list(infos), self._new_names
            )
        else:
            answers = Answers(envs, outcome, envs[:0], envs, outcome[0], outcome[4], self._new_names)
        # Not before the last observations have been read. Of a process that is gone by now, its next use tells.
        with suppress(WorkerError):
            self._begin_anew()
        return answers

    def _outcome(self, envs: Rows, answers: Sequence[tuple[Any, ...]]) -> Outcome:
        """Work out what steps led to."""
        if not answers:
            return [], np.empty(0), np.empty(0, np.bool_), np.empty(0, np.bool_), []
        obs, rewards, terminateds, truncateds, infos = zip(*answers, strict=True)
        refuse = self.refusing(*envs.tolist())
        shape = (len(envs),)
        paid = exact_rows(names.REWARDS, rewards, FLOAT, shape, refuse)
        flags = (
            exact_rows(names.TERMINATEDS, terminateds, BOOL, shape, refuse),
            exact_rows(names.TRUNCATEDS, truncateds, BOOL, shape, refuse),
        )
        new_obs, said = self._leaves(envs, obs), list(infos)
        if self._reset_by is None:
            ended = (flags[0] | flags[1]).nonzero()[0]
            for row in ended.tolist():
                said[row] = infos[row].get("final_info", {})
            if len(ended):
                finals = [infos[row]["final_obs"] for row in ended.tolist()]
                new_obs = [
                    put(leaf, ended, last)
                    for leaf, last in zip(new_obs, self._apart(envs[ended], finals, names.NEXT_OBS), strict=True)
                ]
        return new_obs, paid, *flags, said

    def _leaves(self, envs: Rows, observations: Sequence[Any]) -> list[Leaf]:
        """Lay observations of environments one under the other, leaf by leaf, in memory of their own."""
        if not len(envs):
            return []
        if self._shared is not None:
            return [leaf[envs] for leaf in self._shared]
        return self._apart(envs, observations, names.OBS)

    def _apart(self, envs: Rows, observations: Sequence[Any], top: str) -> list[Leaf]:
        """Take observations of environments apart, and lay them one under the other, leaf by leaf."""
        leaves = [
            self.observations.flatten_one(obs, top, self.refusing(env))
            for env, obs in zip(envs.tolist(), observations, strict=True)
        ]
        return [np.concatenate(parts) for parts in zip(*leaves, strict=True)]

    def step_raw(self, actions: Sequence[Leaf]) -> Sequence[Any]:
        """Step every environment; see `Environments.step_raw`.

        Raises
        ------
        WorkerError
            If an environment fails.
        """
        self.send(actions, np.arange(self.num_envs))
        answers = made = self.wait(self.num_envs)
        self._processes.check()
        new_obs, *_, told = made.outcome
        obs, infos = [leaf.copy() for leaf in new_obs], list(told)
        while True:
            if answers.obs:
                obs = [put(leaf, answers.ready, begun) for leaf, begun in zip(obs, answers.obs, strict=True)]
            for env, info in zip(answers.ready.tolist(), answers.infos, strict=True):
                infos[env] = info
            if not self.under_way:
                break
            answers = self.wait(self.under_way)
        return (*made.outcome, obs, infos)

    def render(self, envs: Rows) -> None:
        """Render environments that are ready.

        Raises
        ------
        WorkerError
            If an environment fails.
        """
        for env in envs.tolist():
            self._processes.ask(env, "_call", ("render", (), {}))
        among = np.zeros(self.num_envs, np.bool_)
        among[envs] = True
        self._processes.receive(len(envs), None, among)
        self._processes.check()

    def close(self) -> None:
        """Wait for what is under way and close the environments; those that take too long are ended."""
        self._processes.close()

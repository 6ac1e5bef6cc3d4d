"""AsyncEnvironments: environments in processes of their own, each stepped when it is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.column.exact import BOOL, FLOAT
from samplebatch.env.base import OUTCOMES, Environments, Flags, Floats
from samplebatch.env.environment_list import check_space
from samplebatch.env.environment_process import LOAD, RENDER, RESET, SAVE, STEP, STEPPED
from samplebatch.env.infos import Infos, Rows
from samplebatch.env.processes import EnvironmentProcesses
from samplebatch.env.seeds import seeds_of_reset
from samplebatch.env.shared_observations import FIRST_OBS, NEW_OBS, SharedObservations
from samplebatch.env.spaces import Columns, Leaf, SpaceLayout, put
from samplebatch.errors import EnvironmentSpecError

_NONE: Rows = np.empty(0, np.intp)


class AsyncStepResult(NamedTuple):
    """The step results of environments that have answered: k of them made a step, m of them can be acted in now.

    Attributes
    ----------
    envs
        The environments that made a step, ascending, shape (k,).
    columns
        The columns `new_obs` (or its parts), `rewards`, `terminateds` and `truncateds` of these steps, each of shape
        (k, ...); where an episode ended, its last observation. None if k is 0.
    step_infos
        The infos of these steps.
    ended
        Those of the environments whose episode ended.
    ready
        The environments that can be acted in, ascending, shape (m,): those that made a step, unless they have yet to
        begin another episode, and those that have begun one.
    obs, infos
        The observations to act on there, by leaf, and the infos that came with them. No leaves if m is 0.
    """

    envs: Rows
    columns: Columns
    step_infos: list[dict[str, Any]]
    ended: Rows
    ready: Rows
    obs: Sequence[Leaf]
    infos: list[dict[str, Any]]


class AsyncEnvironments(Environments):
    """Environments in processes of their own, for `AsyncCollector`: each stepped when it is ready, or all together.

    An environment whose episode ended begins another one at once. That is no step, and nobody waits for it before the
    last step of the episode is told.

    Parameters
    ----------
    makers
        Functions that make the environments, one each.
    start_method
        How processes start: `"spawn"`, `"forkserver"` or `"fork"`.
    stall_timeout_s
        Seconds without an answer after which an environment is taken to hang.

    Raises
    ------
    EnvironmentSpecError
        If an environment cannot be made, is no Gymnasium environment, or has other spaces than the first one.
    WorkerError
        If an environment raises when it is made, or its process ends.

    Examples
    --------
    >>> from samplebatch.env.as_environments import environment_makers
    >>> environments = AsyncEnvironments(environment_makers("CartPole-v1", 2))
    >>> _ = environments.reset(seeds=[1, 2])
    >>> environments.send(np.array([1]), [np.array([0])])
    >>> result = environments.recv()
    >>> result.envs, result.ready, result.obs[0].shape
    (array([1]), array([1]), (1, 4))
    >>> environments.close()
    """

    def __init__(
        self, makers: Sequence[Callable[[], Any]], *, start_method: str = "spawn", stall_timeout_s: float = 300.0
    ) -> None:
        count = len(makers)
        self._processes = EnvironmentProcesses(makers, start_method, stall_timeout_s)
        try:
            answers = self._processes.receive(count)
            self._processes.check()
            spaces = [answer[1:] for _, (answer,) in answers]
            super().__init__(None, count, *_common_spaces(spaces))
            self._shared = SharedObservations.create(self.observations, count)
            if self._shared.region is not None:
                self._processes.share(self._shared.region, count)
                self._shared.region.close_descriptor()
        except BaseException:
            self._processes.close()
            raise

    @property
    def under_way(self) -> int:
        """How many environments were asked for something, and have not been waited for."""
        return self._processes.under_way

    @property
    def pids(self) -> list[int]:
        """Process ids of the environments, in their order."""
        return [process.pid or 0 for process in self._processes.processes]

    def reset(
        self,
        *,
        seeds: Sequence[int] | None = None,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        **given: Any,
    ) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; steps that are under way are waited for, and dropped.

        Parameters
        ----------
        seeds
            A seed for each environment; None leaves their generators running.
        seed
            Takes precedence: a seed for each environment, or the first of them, from which the others count on.
        options, **given
            Arguments of every environment's own `reset`.

        Raises
        ------
        EnvironmentSpecError
            If there are not as many seeds as environments, or an observation is refused.
        WorkerError
            If an environment fails.
        """
        count = self.num_envs
        numbers = seeds_of_reset(count, seeds, seed)
        while self.under_way:
            self.recv(self.under_way)
        for env, number in enumerate(numbers):
            self._processes.ask(env, RESET, {"seed": number, "options": options, **given})
        # Where several fail, the first of them is told, and the others are not left for later.
        self._processes.wait_for_all()
        begun = self.recv(count)
        self._processes.check()
        return begun.obs, begun.infos

    def send(self, envs: Rows, actions: Sequence[Leaf]) -> None:
        """Let environments that are ready make a step.

        Parameters
        ----------
        envs
            The environments, shape (k,).
        actions
            The leaves of the actions, each of shape (k, ...).

        Raises
        ------
        EnvironmentSpecError, WorkerError
            If an environment has failed.
        """
        for env, action in zip(envs.tolist(), self.actions.nest_each(actions, len(envs)), strict=True):
            self._processes.ask(env, STEP, action)

    def recv(
        self, min_num: int = 1, timeout_s: float | None = None, among: npt.NDArray[np.bool_] | None = None
    ) -> AsyncStepResult:
        """Wait for environments that are under way, and return the step results of all that are done.

        Parameters
        ----------
        min_num
            How many to wait for; if fewer are under way, for all of these.
        timeout_s
            Seconds after which fewer are enough, if it is one at least.
        among
            Whether to wait for each environment, shape (num_envs,): others stay under way. None for all.

        Raises
        ------
        EnvironmentSpecError
            If an environment returned a value that was refused.
        WorkerError
            If an environment raised or hangs, or its process ended; the steps of others are returned before.
        """
        stepped: dict[int, Sequence[Any]] = {}
        begun: dict[int, Sequence[Any]] = {}
        for env, answers in self._processes.receive(min_num, timeout_s, among):
            for kind, *answer in answers:
                (stepped if kind == STEPPED else begun)[env] = answer
        if not begun and not stepped:
            return AsyncStepResult(_NONE, {}, [], _NONE, _NONE, [], [])
        envs = np.array(list(stepped), np.intp)
        new_obs, rewards, terminateds, truncateds, infos = self._steps(envs, list(stepped.values()))
        columns = dict(zip(self._new_names, new_obs, strict=True)) if stepped else {}
        if stepped:
            columns |= zip(OUTCOMES, (rewards, terminateds, truncateds), strict=True)
        done = terminateds | truncateds
        if not begun and not done.any():
            return AsyncStepResult(envs, columns, infos, envs[:0], envs, new_obs, infos)
        goes_on = ~done
        first = np.array(list(begun), np.intp)
        ready = np.concatenate([envs[goes_on], first])
        order = ready.argsort()
        said = [infos[row] for row in goes_on.nonzero()[0].tolist()] + [info for _, info in begun.values()]
        parts = [[leaf[goes_on] for leaf in new_obs]] if goes_on.any() else []
        if begun:
            parts.append(self._shared.read(first, FIRST_OBS, [left for left, _ in begun.values()]))
        obs = [np.concatenate(leaves)[order] for leaves in zip(*parts, strict=True)]
        said = [said[row] for row in order.tolist()]
        return AsyncStepResult(envs, columns, infos, envs[done], ready[order], obs, said)

    def _steps(self, envs: Rows, steps: Sequence[Sequence[Any]]) -> tuple[list[Leaf], Floats, Flags, Flags, list[Any]]:
        """Put steps together: new observations by leaf, rewards, flags and infos."""
        if not steps:
            return [], np.empty(0, FLOAT), np.empty(0, BOOL), np.empty(0, BOOL), []
        left, rewards, terminateds, truncateds, infos = zip(*steps, strict=True)
        flags = np.array(terminateds, BOOL), np.array(truncateds, BOOL)
        return self._shared.read(envs, NEW_OBS, left), np.array(rewards, FLOAT), *flags, list(infos)

    def step_raw(self, actions: Sequence[Leaf]) -> Sequence[Any]:
        """Step every environment; see `Environments.step_raw`.

        Raises
        ------
        EnvironmentSpecError, WorkerError
            If an environment fails.
        """
        self.send(np.arange(self.num_envs), actions)
        made = result = self.recv(self.num_envs)
        self._processes.check()
        new_obs = [made.columns[name] for name in self._new_names]
        obs, infos = [leaf.copy() for leaf in new_obs], list(made.step_infos)
        while True:
            if result.obs:
                obs = [put(leaf, result.ready, begun) for leaf, begun in zip(obs, result.obs, strict=True)]
            for env, info in zip(result.ready.tolist(), result.infos, strict=True):
                infos[env] = info
            if not self.under_way:
                break
            result = self.recv(self.under_way)
        said = made.step_infos if any(made.step_infos) else []
        return (new_obs, *(made.columns[name] for name in OUTCOMES), said, None, obs, infos)

    def next_obs(self, step: Any) -> tuple[Sequence[Leaf], Infos]:
        """Return the observations to act on; see `Environments.next_obs`."""
        return step[6], step[7]

    def render(self, envs: Rows) -> None:
        """Render environments that are ready.

        Raises
        ------
        WorkerError
            If an environment fails.
        """
        for env in envs.tolist():
            self._processes.ask(env, RENDER)
        among = np.zeros(self.num_envs, np.bool_)
        among[envs] = True
        self._processes.receive(len(envs), None, among)
        self._processes.check()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environments, which their processes pickle; see `Environments.state_dict`.

        Raises
        ------
        WorkerError
            If a process ends.
        """
        found = self._ask_all(SAVE, [None] * self.num_envs)
        refused = next((one for one in found if one["pickles"] is None), None)
        pickles = [pickled for one in found for pickled in one["pickles"] or ()]
        return {"saved": refused or {"pickles": pickles, "why": None}, "made": self.made}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue where environments made alike were; see `Environments.load_state_dict`.

        Raises
        ------
        EnvironmentSpecError
            If they are of other classes.
        WorkerError
            If a process ends.
        """
        pickles = state["saved"]["pickles"]
        if pickles is not None:
            self._ask_all(LOAD, [{"pickles": [pickled], "why": None} for pickled in pickles])
            self.made = state["made"]
        return pickles is not None

    def _ask_all(self, command: int, given: Sequence[Any]) -> list[Any]:
        """Let the process of each environment, none of them under way, carry out a command, and return the answers."""
        for env, own in enumerate(given):
            self._processes.ask(env, command, own)
        self._processes.wait_for_all()
        self._processes.check()
        return [answer for _, answers in self._processes.receive(len(given)) for _, answer in answers]

    def close(self) -> None:
        """Let the environments finish their steps and close; those that take longer than ten seconds are ended."""
        self._processes.close()
        self._shared.close()


def _common_spaces(spaces: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the spaces that all environments have.

    Raises
    ------
    EnvironmentSpecError
        If one has others than the first.
    """
    first = spaces[0]
    order = SpaceLayout(first[0]).names
    for env, (observations, actions) in enumerate(spaces):
        check_space(names.OBS, env, observations, first[0])
        check_space(names.ACTIONS, env, actions, first[1])
        if SpaceLayout(observations).names != order:
            raise EnvironmentSpecError(
                f"environments must have the parts of their observations in the order of environment 0, {order}, got "
                f"{SpaceLayout(observations).names} from environment {env}"
            )
    return first

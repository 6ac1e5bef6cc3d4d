"""AsyncEnvironments: environments in processes of their own, each stepped when it is ready."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.column.casting import BOOL, FLOAT
from samplebatch.env.base import OUTCOMES, Environments, Flags, Floats
from samplebatch.env.children import end_children, start_child, wait_for_exit
from samplebatch.env.environment_process import (
    FAILED,
    FIRST_OBS,
    LOAD,
    MORE,
    NEW_OBS,
    RENDER,
    RESET,
    SAVE,
    SHARE,
    STEP,
    STEPPED,
    SharedObservations,
    run_environment,
)
from samplebatch.env.gymnasium import check_space
from samplebatch.env.infos import Infos, Rows
from samplebatch.env.seeds import seeds_of_reset
from samplebatch.env.spaces import Columns, Leaf, SpaceLayout, put
from samplebatch.errors import EnvironmentSpecError, SampleBatchError, WorkerError
from samplebatch.transport.peers import Poller
from samplebatch.transport.region import Region

_LOOK_EVERY_S = 1.0
"""How often a process that does not answer is looked at."""
_START_WITHIN_S = 60.0
"""How long processes may take in any case to start and make their environments."""
_CLOSE_WITHIN_S = 10.0
"""How long processes may take to come to their end when they are closed."""

Answer = tuple[Any, ...]
"""The kind of an answer, and its parts; see `environment_process`."""


class EnvironmentProcesses:
    """The processes of an `AsyncEnvironments`, asked one by one.

    Parameters
    ----------
    makers
        Functions that make the environments, one each.
    start_method
        How processes start: `"spawn"`, `"forkserver"` or `"fork"`.
    stall_timeout_s
        Seconds after which a process that has not answered is taken to hang, and killed.

    Attributes
    ----------
    processes
        The processes, by environment.
    """

    def __init__(self, makers: Sequence[Callable[[], Any]], start_method: str, stall_timeout_s: float) -> None:
        context = multiprocessing.get_context(start_method)
        self._stall_timeout_s = stall_timeout_s
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._poller = Poller()
        # Ends what is left when nobody has called close; at the end of the program, before that waits for children.
        self._end = util.Finalize(self, _end, (self.processes, self._pipes), exitpriority=10)
        self._asked: dict[int, float] = {}
        self._answers: dict[int, list[Answer]] = {}
        self._failures: dict[int, SampleBatchError] = {}
        self._lost: WorkerError | None = None
        self._midst: int | None = None
        self._looked_at = time.monotonic()
        try:
            for index, make in enumerate(makers):
                self._start(context, index, make)
        except BaseException:
            self._end()
            raise
        self._index_of = {pipe.fileno(): index for index, pipe in enumerate(self._pipes)}
        for descriptor in self._index_of:
            self._poller.register(descriptor)
        allowed_s = max(0.0, _START_WITHIN_S - stall_timeout_s)
        self._asked = dict.fromkeys(range(len(makers)), time.monotonic() + allowed_s)

    def _start(self, context: Any, index: int, make: Callable[[], Any]) -> None:
        ours, theirs = context.Pipe()
        self._pipes.append(ours)
        with theirs:
            must = (
                f"environments are made in other processes, and environment {index} must be given as an id or a "
                "function that can be pickled"
            )
            args = (theirs, _Maker(make), index)
            process = start_child(context, run_environment, args, name=f"environment-{index}", must=must)
        self.processes.append(process)

    @property
    def under_way(self) -> int:
        """How many processes were asked, and their answers not handed out."""
        return len(self._asked.keys() | self._answers.keys())

    def share(self, region: Region, num_envs: int) -> None:
        """Give all processes shared memory for the observations of `num_envs` environments."""
        for index, (pipe, process) in enumerate(zip(self._pipes, self.processes, strict=True)):
            try:
                pipe.send_bytes(pickle.dumps((SHARE, (num_envs, region.nbytes))))
                reduction.send_handle(pipe, region.fileno(), process.pid)
            except ConnectionError:
                self._lose_ended(index)
        self.check()

    def check(self) -> None:
        """Tell of a failure; of one that a process survives only once."""
        if self._lost is not None:
            raise self._lost
        if self._midst is not None:
            raise WorkerError(
                f"an exchange with environment {self._midst} must be whole, and was interrupted; close the "
                "collector, and make another"
            )
        if self._failures:
            failure = self._failures[min(self._failures)]
            self._failures.clear()
            raise failure

    def ask(self, index: int, command: int, given: Any = None) -> None:
        """Ask a process to carry out a command."""
        self.check()
        request = pickle.dumps((command, given), pickle.HIGHEST_PROTOCOL)
        self._midst = index
        try:
            self._pipes[index].send_bytes(request)
        except ConnectionError:
            self._lose_ended(index)
        else:
            self._asked[index] = time.monotonic()
        self._midst = None
        if self._lost is not None:
            raise self._lost

    def receive(
        self, min_num: int, timeout_s: float | None = None, among: npt.NDArray[np.bool_] | None = None
    ) -> list[tuple[int, list[Answer]]]:
        """Wait for answers, and return all that there are.

        Parameters
        ----------
        min_num
            How many processes to wait for; if fewer are under way, for all of these.
        timeout_s
            Seconds after which fewer are enough, if it is one at least.
        among
            Whether to wait for each process, shape (num_envs,); answers of others are kept for later. None for all.
        """
        expected = self._asked.keys() | self._answers.keys()
        min_num = min(min_num, len(expected) if among is None else sum(bool(among[index]) for index in expected))
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        self._listen(0.0)
        while True:
            found = sorted(index for index in self._answers if among is None or among[index])
            left = None if give_up is None else give_up - time.monotonic()
            failed = self._lost is not None or self._midst is not None or bool(self._failures)
            if not found:
                self.check()
            if len(found) >= min_num or (found and (failed or (left is not None and left <= 0))):
                return [(index, self._answers.pop(index)) for index in found]
            self._listen(_LOOK_EVERY_S if left is None or left <= 0 else min(left, _LOOK_EVERY_S))

    def wait_for_all(self) -> None:
        """Wait for all that are under way; of failures, and of processes that are lost, the next call tells."""
        while self._asked and self._midst is None:
            self._listen(_LOOK_EVERY_S)

    def _listen(self, patience_s: float) -> None:
        """Take the answers that are there, or that come first within so many seconds."""
        if self._midst is not None:
            return
        for descriptor in self._poller.poll(patience_s):
            self._take(self._index_of[descriptor])
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._look(now)

    def _take(self, index: int) -> None:
        """Take a message, or notice that there will be none."""
        self._midst = index
        try:
            message = self._pipes[index].recv_bytes()
        except (EOFError, ConnectionError):
            self._lose_ended(index)
        else:
            if message[:1] == MORE:
                self._asked[index] = time.monotonic()
            else:
                self._asked.pop(index, None)
            self._parse(index, message)
        self._midst = None

    def _parse(self, index: int, message: bytes) -> None:
        try:
            answer = pickle.loads(memoryview(message)[1:])
        except Exception as error:
            self._failures[index] = _failure(index, "gave an answer that cannot be read", error)
            return
        if answer[0] != FAILED:
            self._answers.setdefault(index, []).append(answer)
            return
        _, refused, words, pickled, trace = answer
        if refused:
            self._failures[index] = EnvironmentSpecError(words)
            return
        cause = None
        # An error may be one that cannot be pickled, or not be made again.
        with suppress(Exception):
            cause = pickle.loads(pickled)
        failure = _failure(index, words, cause)
        failure.add_note(trace)
        self._failures[index] = failure

    # Processes that are lost

    def _look(self, now: float) -> None:
        """Look for processes that have ended while a child of theirs holds their pipe, and for those that hang."""
        for index, since in list(self._asked.items()):
            if self._pipes[index].poll(0):
                continue
            if not self.processes[index].is_alive():
                self._lose_ended(index)
            elif now - since > self._stall_timeout_s:
                self.processes[index].kill()
                self._lose(index, f"hangs (it has not answered for {self._stall_timeout_s:g} s)")

    def _lose_ended(self, index: int) -> None:
        process = self.processes[index]
        end = wait_for_exit(process, _LOOK_EVERY_S)
        self._lose(index, f"its process {process.pid} {end.how}", end.advice)

    def _lose(self, index: int, how: str, advice: str = "") -> None:
        """Word how a process was lost, and expect nothing more of it."""
        self._asked.pop(index, None)
        if self._index_of.pop(self._pipes[index].fileno(), None) is not None:
            self._poller.unregister(self._pipes[index].fileno())
        if self._lost is not None:
            # The first loss is what others may follow from.
            return
        self._lost = WorkerError(
            f"environment {index} must answer until it is closed, and {how}; close the collector, and make another"
        )
        if advice:
            self._lost.add_note(advice)

    def close(self) -> None:
        """Let the environments finish their steps and close; end the processes, those that hang by force."""
        until = time.monotonic() + _CLOSE_WITHIN_S
        for pipe in self._pipes:
            _hang_up(pipe)
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        self._asked.clear()
        self._answers.clear()
        self._poller.close()
        self._end()


class _Maker:
    """A function that makes an environment, on its way to another process: by value, where cloudpickle is installed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        return self._make()

    def __reduce__(self) -> tuple[Any, ...]:
        # What goes by multiprocessing only, such as shared memory, cannot go by value.
        with suppress(Exception):
            return pickle.loads, (import_module("cloudpickle").dumps(self._make),)
        return _Maker, (self._make,)


def _failure(index: int, how: str, cause: BaseException | None) -> WorkerError:
    """Make the error for a command that an environment could not carry out."""
    error = WorkerError(f"environment {index} must be reset and stepped without error, and {how}")
    error.__cause__ = cause
    return error


def _hang_up(pipe: Connection) -> None:
    """Tell the process at the other end that this one is closed, even if other processes have inherited it."""
    with suppress(OSError), socket.socket(fileno=pipe.fileno()) as own:
        try:
            own.shutdown(socket.SHUT_RDWR)
        finally:
            # The descriptor is the pipe's.
            own.detach()


def _end(processes: Sequence[BaseProcess], pipes: Sequence[Connection]) -> None:
    """Kill processes, and close their pipes and shared memory here."""
    end_children(processes, _LOOK_EVERY_S)
    for pipe in pipes:
        pipe.close()


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
        """Start an episode in every environment; steps that are under way are waited for, and dropped."""
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
        return step[6], step[7]

    def render(self, envs: Rows) -> None:
        """Render environments that are ready."""
        for env in envs.tolist():
            self._processes.ask(env, RENDER)
        among = np.zeros(self.num_envs, np.bool_)
        among[envs] = True
        self._processes.receive(len(envs), None, among)
        self._processes.check()

    def state_dict(self) -> dict[str, Any]:
        found = self._ask_all(SAVE, [None] * self.num_envs)
        refused = next((one for one in found if one["pickles"] is None), None)
        pickles = [pickled for one in found for pickled in one["pickles"] or ()]
        return {"saved": refused or {"pickles": pickles, "why": None}, "made": self.made}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
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
    """Return the spaces that all environments have."""
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

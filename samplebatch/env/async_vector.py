"""Environments in separate processes, each of which is stepped as soon as it is ready.

An environment process executes the requests of its parent process. A request is a pickle of a command and its
arguments. A reply consists of one byte and a pickle; the byte is set if another reply to the same request follows.

===========  ============================  ===========================================================================
command      arguments                     reply
===========  ============================  ===========================================================================
`MAKE`       none; executed on startup     `SPACES`: the observation space and the action space
`SHARE`      num_envs, nbytes              none; the descriptor of shared memory follows on the pipe
`RESET`      keyword arguments             `BEGUN`: left, info
`STEP`       the action                    `STEPPED`: left, reward, terminated, truncated, info; at the end of an
                                           episode `BEGUN` follows after the reset
`RENDER`     none                          `RENDERED`
`SAVE`       none                          `SAVED`: the environment, see `save_environments`
`LOAD`       the value of `SAVED`          `SAVED`: None
===========  ============================  ===========================================================================

"left" contains the leaves of the observation that are not in shared memory. After an error, the reply is `FAILED` with
four items: whether a value was rejected, the error text, the pickled error if it can be pickled, and the traceback.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.column.casting import BOOL, FLOAT, exact_number
from samplebatch.env.base import OUTCOMES, Environments, Flags, Floats
from samplebatch.env.environment_state import SavedEnvironments, load_environments, save_environments
from samplebatch.env.gymnasium import check_space
from samplebatch.env.infos import Infos, Rows
from samplebatch.env.registry import environment_kind, make_environment
from samplebatch.env.seeds import seeds_of_reset
from samplebatch.env.spaces import Columns, Leaf, SpaceLayout, put
from samplebatch.errors import EnvironmentSpecError, SampleBatchError, WorkerError
from samplebatch.transport.peers import Poller, begin_child, end_children, start_child, wait_for_exit
from samplebatch.transport.region import Region

NEW_OBS, FIRST_OBS = range(2)
"""Slots of each environment: for the observation of a step, and for the observation of a reset."""

_ALIGNMENT = 64

Left = list[Any] | None
"""Leaves of an observation that are not in shared memory, None for the others; None if all are in memory."""


class SharedObservations:
    """Shared memory for observations: two slots per environment, mapped by the environment's process and the parent.

    No lock is required: a process writes an observation before it sends its reply, and the parent reads the observation
    before it requests the next step. Non-numeric leaves, and values that exceed the dtype of their space, are sent
    through the pipe.

    - `layout`: layout of the observations.
    - `num_envs`: number of environments.
    - `region`: shared memory of `nbytes` bytes; None if no leaf is numeric.

    >>> from gymnasium import spaces
    >>> layout = SpaceLayout(spaces.Dict(eye=spaces.Box(-1, 1, (2,)), mouth=spaces.Text(9)))
    >>> memory = SharedObservations.create(layout, 3)
    >>> left = memory.write(
    ...     1, NEW_OBS, [np.ones((1, 2), np.float32), np.array(["hello"], object)]
    ... )
    >>> left
    [None, array(['hello'], dtype=object)]
    >>> memory.read(np.array([1]), NEW_OBS, [left])
    [array([[1., 1.]], dtype=float32), array(['hello'], dtype=object)]
    """

    def __init__(self, layout: SpaceLayout, num_envs: int, region: Region | None) -> None:
        self.region = region
        self._leaves: list[Leaf | None] = []
        start = 0
        for space in layout.spaces:
            if region is None or not layout.is_numeric(space):
                self._leaves.append(None)
                continue
            shape = (num_envs, 2, *space.shape)
            count = space.dtype.itemsize * int(np.prod(shape))
            self._leaves.append(region.array[start : start + count].view(space.dtype).reshape(shape))
            start += -(-count // _ALIGNMENT) * _ALIGNMENT

    @classmethod
    def create(cls, layout: SpaceLayout, num_envs: int) -> Self:
        """Allocate the memory for observations of a layout."""
        nbytes = cls.nbytes(layout, num_envs)
        return cls(layout, num_envs, Region.create(nbytes) if nbytes else None)

    @staticmethod
    def nbytes(layout: SpaceLayout, num_envs: int) -> int:
        """Return the number of bytes of shared memory that observations of a layout require."""
        leaves = [space for space in layout.spaces if layout.is_numeric(space)]
        counts = [2 * num_envs * space.dtype.itemsize * int(np.prod(space.shape)) for space in leaves]
        return sum(-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts)

    def write(self, env: int, slot: int, leaves: Sequence[Leaf]) -> Left:
        """Write the observation of an environment, and return the leaves to send through the pipe.

        - `env`: index of the environment.
        - `slot`: `NEW_OBS` or `FIRST_OBS`.
        - `leaves`: leaves of the observation, shape (1, ...) each.
        """
        left: list[Any] = [None] * len(leaves)
        is_in_memory = True
        for number, (shared, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if shared is not None and shared.dtype == leaf.dtype:
                shared[env, slot] = leaf[0]
            else:
                left[number], is_in_memory = leaf, False
        return None if is_in_memory else left

    def read(self, envs: Rows, slot: int, sent: Sequence[Left]) -> list[Leaf]:
        """Return one newly allocated array of observations per leaf.

        - `envs`: indices of at least one environment, shape (k,).
        - `slot`: `NEW_OBS` or `FIRST_OBS`.
        - `sent`: result of `write` for each environment.
        """
        leaves: list[Leaf] = []
        for number, shared in enumerate(self._leaves):
            parts = [None if left is None else left[number] for left in sent]
            if shared is not None and all(part is None for part in parts):
                leaves.append(shared[envs, slot])
                continue
            memory: Any = shared
            leaves.append(
                np.concatenate(
                    [memory[env, slot][None] if part is None else part for env, part in zip(envs, parts, strict=True)]
                )
            )
        return leaves

    def close(self) -> None:
        """Release the memory."""
        self._leaves = []
        if self.region is not None:
            self.region.close()


MAKE, SHARE, RESET, STEP, RENDER, SAVE, LOAD = range(7)
SPACES, BEGUN, STEPPED, RENDERED, SAVED, FAILED = range(6)

LAST, MORE = b"\0", b"\1"


def run_environment(pipe: Connection, make: Callable[[], Any], index: int) -> None:
    """Create an environment and execute requests until the peer closes the pipe.

    - `pipe`: connection on which requests arrive.
    - `make`: function that creates the environment.
    - `index`: index of the environment, for error messages.
    """
    # A forked child inherits the handlers of its parent.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    begin_child()
    service = _Service(pipe, make, index)
    command, argument = MAKE, None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            for message in service.answer(command, argument):
                pipe.send_bytes(message)
            command, argument = pickle.loads(pipe.recv_bytes())
    service.close()


class _Service:
    """Executor of the commands that `run_environment` receives for the environment of this process."""

    _stepper: EnvironmentStepper
    _observations: SharedObservations

    def __init__(self, pipe: Connection, make: Callable[[], Any], index: int) -> None:
        self._pipe, self._make, self._index = pipe, make, index
        self._env: Any = None
        self._commands: dict[int, Callable[[Any], Iterable[bytes]]] = {
            MAKE: self._make_environment,
            SHARE: self._share,
            RESET: self._reset,
            STEP: self._step,
            RENDER: self._render,
            SAVE: self._save,
            LOAD: self._load,
        }

    def answer(self, command: int, argument: Any) -> Iterator[bytes]:
        try:
            yield from self._commands[command](argument)
        except Exception as error:
            yield _failure_message(error)

    def _make_environment(self, _: None) -> Iterator[bytes]:
        self._env = env = make_environment(self._make)
        if environment_kind(env) != "gymnasium":
            raise EnvironmentSpecError(f"environment {self._index} must be a gymnasium.Env, got a {type(env).__name__}")
        self._stepper = EnvironmentStepper(env, self._index)
        self._observations = SharedObservations(self._stepper.observations, 0, None)
        yield _message(SPACES, env.observation_space, env.action_space)

    def _share(self, sizes: tuple[int, int]) -> Iterable[bytes]:
        num_envs, nbytes = sizes
        with Region.attach(reduction.recv_handle(self._pipe), nbytes) as region:
            self._observations = SharedObservations(self._stepper.observations, num_envs, region)
        return ()

    def _reset(self, arguments: dict[str, Any]) -> Iterator[bytes]:
        yield self._tell_begun(*self._stepper.reset(**arguments))

    def _step(self, action: Any) -> Iterator[bytes]:
        step = self._stepper.step(action)
        left = self._observations.write(self._index, NEW_OBS, step.new_obs)
        outcome = left, float(step.reward), bool(step.terminated), bool(step.truncated), step.info
        yield _message(STEPPED, *outcome, more=step.ended)
        if step.ended:
            yield self._tell_begun(*self._stepper.begin_episode())

    def _tell_begun(self, obs: Sequence[Leaf], info: dict[str, Any]) -> bytes:
        return _message(BEGUN, self._observations.write(self._index, FIRST_OBS, obs), info)

    def _render(self, _: None) -> Iterator[bytes]:
        self._env.render()
        yield _message(RENDERED)

    def _save(self, _: None) -> Iterator[bytes]:
        yield _message(SAVED, save_environments([self._env]))

    def _load(self, saved: SavedEnvironments) -> Iterator[bytes]:
        load_environments([self._env], saved)
        yield _message(SAVED, None)

    def close(self) -> None:
        """Close the environment; errors are suppressed, because the parent has closed the pipe."""
        if self._env is not None:
            with contextlib.suppress(Exception):
                self._env.close()


def _message(kind: int, *answer: Any, more: bool = False) -> bytes:
    return (MORE if more else LAST) + pickle.dumps((kind, *answer), pickle.HIGHEST_PROTOCOL)


def _failure_message(error: Exception) -> bytes:
    refused = isinstance(error, EnvironmentSpecError)
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = None
    words = str(error) if refused else f"raised {type(error).__name__}: {error}"
    return _message(FAILED, refused, words, pickled, traceback.format_exc())


class SingleStep(NamedTuple):
    """Result of `EnvironmentStepper.step`: one step of one environment.

    - `new_obs`: leaves of the next observation, shape (1, ...) each.
    - `reward`, `terminated`, `truncated`: a float and two flags, of Python or NumPy types.
    - `info`: copy of the info.
    """

    new_obs: Sequence[Leaf]
    reward: Any
    terminated: Any
    truncated: Any
    info: dict[str, Any]

    @property
    def ended(self) -> bool:
        """Whether the episode ended with this step."""
        return bool(self.terminated or self.truncated)


class EnvironmentStepper:
    """Wrapper of a Gymnasium environment that converts step results losslessly to leaves of its spaces.

    Returned arrays are copies, because the environment may overwrite its own arrays.

    - `env`: a `gymnasium.Env`.
    - `index`: index of the environment, for error messages.

    Instance attributes:
    - `env`: the environment.
    - `observations`, `actions`: layouts of the environment's spaces.

    >>> import gymnasium
    >>> stepper = EnvironmentStepper(gymnasium.make("CartPole-v1"))
    >>> obs, _ = stepper.reset(seed=1)
    >>> step = stepper.step(0)
    >>> step.new_obs[0].shape, step.reward, step.ended
    ((1, 4), 1.0, False)
    """

    def __init__(self, env: Any, index: int = 0) -> None:
        self.env = env
        self.observations, self.actions = SpaceLayout(env.observation_space), SpaceLayout(env.action_space)
        self._index = index
        self._step_count = 0
        self._resets = True

    def reset(self, **arguments: Any) -> tuple[Sequence[Leaf], dict[str, Any]]:
        """Reset the environment on request, and reset the number of steps that error messages contain.

        - `**arguments`: arguments of the environment's `reset`.
        """
        self._step_count = 0
        return self.begin_episode(**arguments)

    def begin_episode(self, **arguments: Any) -> tuple[Sequence[Leaf], dict[str, Any]]:
        """Reset the environment after an episode; unlike `reset`, do not reset the number of steps."""
        self._resets = True
        obs, info = self.env.reset(**arguments)
        return self._flatten(obs), dict(info)

    def step(self, action: Any) -> SingleStep:
        """Step the environment.

        - `action`: action with the structure of the action space.
        """
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._resets = False
        self._step_count += 1
        refuse = self._refuse
        return SingleStep(
            self._flatten(obs),
            exact_number(names.REWARDS, reward, FLOAT, refuse),
            exact_number(names.TERMINATEDS, terminated, BOOL, refuse),
            exact_number(names.TRUNCATEDS, truncated, BOOL, refuse),
            dict(info),
        )

    def _flatten(self, obs: Any) -> Sequence[Leaf]:
        return self.observations.flatten_one(obs, names.OBS, self._refuse)

    def _refuse(self, sentence: str, row: int | None) -> EnvironmentSpecError:
        after = f"the reset after step {self._step_count}" if self._step_count else "a reset"
        where = after if self._resets else f"step {self._step_count}"
        return EnvironmentSpecError(f"{sentence} from environment {self._index} in {where}")


_LOOK_EVERY_S = 1.0
"""Interval at which processes without an answer are checked."""
_START_WITHIN_S = 60.0
"""Minimum time limit for processes to start and create their environments."""
_CLOSE_WITHIN_S = 10.0
"""Time limit for processes to exit after `close`."""

Answer = tuple[Any, ...]
"""Kind and parts of an answer; see the table above."""


class EnvironmentProcesses:
    """Environment processes of `AsyncEnvironments`, to which requests are sent individually.

    - `makers`: one function per environment, which creates the environment.
    - `start_method`: start method of the processes: `"spawn"`, `"forkserver"` or `"fork"`.
    - `stall_timeout_s`: seconds without a reply after which a process is considered hung and is killed.

    Instance attributes:
    - `processes`: one process per environment, in order.
    """

    def __init__(self, makers: Sequence[Callable[[], Any]], start_method: str, stall_timeout_s: float) -> None:
        context = multiprocessing.get_context(start_method)
        self._stall_timeout_s = stall_timeout_s
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._poller = Poller()
        # Kills remaining processes if close was not called, at exit before Python waits for child processes.
        self._end = util.Finalize(self, _end, (self.processes, self._pipes), exitpriority=10)
        self._request_times: dict[int, float] = {}
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
        self._request_times = dict.fromkeys(range(len(makers)), time.monotonic() + allowed_s)

    def _start(self, context: Any, index: int, make: Callable[[], Any]) -> None:
        ours, theirs = context.Pipe()
        self._pipes.append(ours)
        with theirs:
            requirement = (
                f"environments are created in other processes, and environment {index} must be passed as an id or a "
                "function that can be pickled"
            )
            args = (theirs, _Maker(make), index)
            process = start_child(context, run_environment, args, name=f"environment-{index}", requirement=requirement)
        self.processes.append(process)

    @property
    def under_way(self) -> int:
        """Number of processes with a request whose reply `receive` has not returned yet."""
        return len(self._request_times.keys() | self._answers.keys())

    def share(self, region: Region, num_envs: int) -> None:
        """Send shared memory for the observations of `num_envs` environments to all processes."""
        for index, (pipe, process) in enumerate(zip(self._pipes, self.processes, strict=True)):
            try:
                pipe.send_bytes(pickle.dumps((SHARE, (num_envs, region.nbytes))))
                reduction.send_handle(pipe, region.fileno(), process.pid)
            except ConnectionError:
                self._lose_ended(index)
        self.check()

    def check(self) -> None:
        """Raise the error of a failed process; an error that the process survived is raised only once."""
        if self._lost is not None:
            raise self._lost
        if self._midst is not None:
            raise WorkerError(
                f"the exchange with environment {self._midst} must be complete, but was interrupted; close the "
                "collector and create a new one"
            )
        if self._failures:
            failure = self._failures[min(self._failures)]
            self._failures.clear()
            raise failure

    def ask(self, index: int, command: int, argument: Any = None) -> None:
        """Send a command to a process."""
        self.check()
        request = pickle.dumps((command, argument), pickle.HIGHEST_PROTOCOL)
        self._midst = index
        try:
            self._pipes[index].send_bytes(request)
        except ConnectionError:
            self._lose_ended(index)
        else:
            self._request_times[index] = time.monotonic()
        self._midst = None
        if self._lost is not None:
            raise self._lost

    def receive(
        self, min_num: int, timeout_s: float | None = None, among: npt.NDArray[np.bool_] | None = None
    ) -> list[tuple[int, list[Answer]]]:
        """Wait for replies and return all available replies.

        - `min_num`: number of processes to wait for, limited to the number of processes with pending requests.
        - `timeout_s`: seconds after which a single reply is sufficient.
        - `among`: mask of the processes to wait for, shape (num_envs,); replies of all other processes stay queued.
          None waits for all processes.
        """
        expected = self._request_times.keys() | self._answers.keys()
        min_num = min(min_num, len(expected) if among is None else sum(bool(among[index]) for index in expected))
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        self._listen(0.0)
        while True:
            answered = sorted(index for index in self._answers if among is None or among[index])
            left = None if give_up is None else give_up - time.monotonic()
            failed = self._lost is not None or self._midst is not None or bool(self._failures)
            if not answered:
                self.check()
            if len(answered) >= min_num or (answered and (failed or (left is not None and left <= 0))):
                return [(index, self._answers.pop(index)) for index in answered]
            self._listen(_LOOK_EVERY_S if left is None or left <= 0 else min(left, _LOOK_EVERY_S))

    def wait_for_all(self) -> None:
        """Wait for the replies to all pending requests; the next call raises any errors in these replies."""
        while self._request_times and self._midst is None:
            self._listen(_LOOK_EVERY_S)

    def _listen(self, patience_s: float) -> None:
        """Receive available replies; if there are none, wait at most `patience_s` seconds for the first replies."""
        if self._midst is not None:
            return
        for descriptor in self._poller.poll(patience_s):
            self._take(self._index_of[descriptor])
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._look(now)

    def _take(self, index: int) -> None:
        self._midst = index
        try:
            message = self._pipes[index].recv_bytes()
        except (EOFError, ConnectionError):
            self._lose_ended(index)
        else:
            if message[:1] == MORE:
                self._request_times[index] = time.monotonic()
            else:
                self._request_times.pop(index, None)
            self._parse(index, message)
        self._midst = None

    def _parse(self, index: int, message: bytes) -> None:
        try:
            answer = pickle.loads(memoryview(message)[1:])
        except Exception as error:
            self._failures[index] = _failure(index, "sent a reply that cannot be unpickled", error)
            return
        if answer[0] != FAILED:
            self._answers.setdefault(index, []).append(answer)
            return
        _, refused, words, pickled, trace = answer
        if refused:
            self._failures[index] = EnvironmentSpecError(words)
            return
        cause = None
        # Some errors cannot be pickled or unpickled.
        with suppress(Exception):
            cause = pickle.loads(pickled)
        failure = _failure(index, words, cause)
        failure.add_note(trace)
        self._failures[index] = failure

    # Lost processes

    def _look(self, now: float) -> None:
        """Detect hung processes, and exited processes whose pipe is still open in a child process."""
        for index, since in list(self._request_times.items()):
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
        """Record why a process failed, and discard its pending request."""
        self._request_times.pop(index, None)
        if self._index_of.pop(self._pipes[index].fileno(), None) is not None:
            self._poller.unregister(self._pipes[index].fileno())
        if self._lost is not None:
            # The first loss may be the cause of the others.
            return
        self._lost = WorkerError(
            f"environment {index} must reply until it is closed, but {how}; close the collector and create a new one"
        )
        if advice:
            self._lost.add_note(advice)

    def close(self) -> None:
        """Wait for steps in flight, close the environments, wait for the processes to exit, and kill hung processes."""
        until = time.monotonic() + _CLOSE_WITHIN_S
        for pipe in self._pipes:
            _hang_up(pipe)
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        self._request_times.clear()
        self._answers.clear()
        self._poller.close()
        self._end()


class _Maker:
    """Wrapper that pickles an environment function by value, if cloudpickle is installed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        return self._make()

    def __reduce__(self) -> tuple[Any, ...]:
        # Objects that only multiprocessing can send, such as shared memory, cannot be pickled by value.
        with suppress(Exception):
            return pickle.loads, (import_module("cloudpickle").dumps(self._make),)
        return _Maker, (self._make,)


def _failure(index: int, how: str, cause: BaseException | None) -> WorkerError:
    error = WorkerError(f"environment {index} must be reset and stepped without error, but {how}")
    error.__cause__ = cause
    return error


def _hang_up(pipe: Connection) -> None:
    """Signal end of file to the peer process, even if other processes have inherited this end of the pipe."""
    with suppress(OSError), socket.socket(fileno=pipe.fileno()) as peer_socket:
        try:
            peer_socket.shutdown(socket.SHUT_RDWR)
        finally:
            # The pipe owns the descriptor.
            peer_socket.detach()


def _end(processes: Sequence[BaseProcess], pipes: Sequence[Connection]) -> None:
    """Kill processes and close this end of their pipes."""
    end_children(processes, _LOOK_EVERY_S)
    for pipe in pipes:
        pipe.close()


_NONE: Rows = np.empty(0, np.intp)


class AsyncStepResult(NamedTuple):
    """Step results of k environments that have completed a step, and observations of m environments that are ready.

    - `envs`: indices of environments that have completed a step, ascending, shape (k,).
    - `columns`: columns `new_obs` (or one column per leaf), `rewards`, `terminateds` and `truncateds` of the steps,
      shape (k, ...) each. If a step ended an episode, `new_obs` is the final observation. None if k is 0.
    - `step_infos`: infos of the steps.
    - `ended`: indices of environments whose episode ended.
    - `ready`: indices of environments that are ready for an action, ascending, shape (m,). Ready environments have
      completed a step that did not end the episode, or have started an episode.
    - `obs`, `infos`: observations (one array per leaf) and infos of the ready environments. `obs` is empty if m is 0.
    """

    envs: Rows
    columns: Columns
    step_infos: list[dict[str, Any]]
    ended: Rows
    ready: Rows
    obs: Sequence[Leaf]
    infos: list[dict[str, Any]]


class AsyncEnvironments(Environments):
    """Environments of `AsyncCollector`, run in separate processes and stepped individually or together.

    An environment is reset immediately after its episode has ended. The reset is not a step. The last step of the
    episode is returned without waiting for the reset.

    - `makers`: one function per environment, which creates the environment.
    - `start_method`: start method of the processes: `"spawn"`, `"forkserver"` or `"fork"`.
    - `stall_timeout_s`: seconds without a reply after which an environment is considered hung.

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
        """Number of environments with pending requests."""
        return self._processes.under_way

    @property
    def pids(self) -> list[int]:
        """Process id of each environment."""
        return [process.pid or 0 for process in self._processes.processes]

    def reset(
        self,
        *,
        seeds: Sequence[int] | None = None,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; steps in flight are completed and discarded."""
        count = self.num_envs
        numbers = seeds_of_reset(count, seeds, seed)
        while self.under_way:
            self.recv(self.under_way)
        for env, number in enumerate(numbers):
            self._processes.ask(env, RESET, {"seed": number, "options": options, **arguments})
        # If several environments fail, raise the first error and discard the others.
        self._processes.wait_for_all()
        result = self.recv(count)
        self._processes.check()
        return result.obs, result.infos

    def send(self, envs: Rows, actions: Sequence[Leaf]) -> None:
        """Step environments that are ready.

        - `envs`: indices of the environments, shape (k,).
        - `actions`: leaves of the actions, shape (k, ...) each.
        """
        for env, action in zip(envs.tolist(), self.actions.nest_each(actions, len(envs)), strict=True):
            self._processes.ask(env, STEP, action)

    def recv(
        self, min_num: int = 1, timeout_s: float | None = None, among: npt.NDArray[np.bool_] | None = None
    ) -> AsyncStepResult:
        """Wait for pending environments, and return the results of all environments that have replied.

        - `min_num`: number of environments to wait for, limited to the number of pending environments.
        - `timeout_s`: seconds after which the reply of a single environment is sufficient.
        - `among`: mask of the environments to wait for, shape (num_envs,); all other environments stay pending. None
          waits for all environments.
        """
        stepped: dict[int, Sequence[Any]] = {}
        resets: dict[int, Sequence[Any]] = {}
        for env, answers in self._processes.receive(min_num, timeout_s, among):
            for kind, *answer in answers:
                (stepped if kind == STEPPED else resets)[env] = answer
        if not resets and not stepped:
            return AsyncStepResult(_NONE, {}, [], _NONE, _NONE, [], [])
        envs = np.array(list(stepped), np.intp)
        new_obs, rewards, terminateds, truncateds, infos = self._steps(envs, list(stepped.values()))
        columns = dict(zip(self._new_names, new_obs, strict=True)) if stepped else {}
        if stepped:
            columns |= zip(OUTCOMES, (rewards, terminateds, truncateds), strict=True)
        done = terminateds | truncateds
        if not resets and not done.any():
            return AsyncStepResult(envs, columns, infos, envs[:0], envs, new_obs, infos)
        goes_on = ~done
        first = np.array(list(resets), np.intp)
        completed = np.concatenate([envs[goes_on], first])
        order = completed.argsort()
        all_infos = [infos[row] for row in goes_on.nonzero()[0].tolist()] + [info for _, info in resets.values()]
        parts = [[leaf[goes_on] for leaf in new_obs]] if goes_on.any() else []
        if resets:
            parts.append(self._shared.read(first, FIRST_OBS, [left for left, _ in resets.values()]))
        obs = [np.concatenate(leaves)[order] for leaves in zip(*parts, strict=True)]
        all_infos = [all_infos[row] for row in order.tolist()]
        return AsyncStepResult(envs, columns, infos, envs[done], completed[order], obs, all_infos)

    def _steps(self, envs: Rows, steps: Sequence[Sequence[Any]]) -> tuple[list[Leaf], Floats, Flags, Flags, list[Any]]:
        if not steps:
            return [], np.empty(0, FLOAT), np.empty(0, BOOL), np.empty(0, BOOL), []
        left, rewards, terminateds, truncateds, infos = zip(*steps, strict=True)
        flags = np.array(terminateds, BOOL), np.array(truncateds, BOOL)
        return self._shared.read(envs, NEW_OBS, left), np.array(rewards, FLOAT), *flags, list(infos)

    def step_raw(self, actions: Sequence[Leaf]) -> Sequence[Any]:
        self.send(np.arange(self.num_envs), actions)
        stepped = result = self.recv(self.num_envs)
        self._processes.check()
        new_obs = [stepped.columns[name] for name in self._new_names]
        obs, infos = [leaf.copy() for leaf in new_obs], list(stepped.step_infos)
        while True:
            if result.obs:
                obs = [put(leaf, result.ready, first) for leaf, first in zip(obs, result.obs, strict=True)]
            for env, info in zip(result.ready.tolist(), result.infos, strict=True):
                infos[env] = info
            if not self.under_way:
                break
            result = self.recv(self.under_way)
        step_infos = stepped.step_infos if any(stepped.step_infos) else []
        return (new_obs, *(stepped.columns[name] for name in OUTCOMES), step_infos, None, obs, infos)

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
        saved = self._ask_all(SAVE, [None] * self.num_envs)
        failed = next((answer for answer in saved if answer["pickles"] is None), None)
        pickles = [pickled for answer in saved for pickled in answer["pickles"] or ()]
        return {"saved": failed or {"pickles": pickles, "why": None}, "made": self.made}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        pickles = state["saved"]["pickles"]
        if pickles is not None:
            self._ask_all(LOAD, [{"pickles": [pickled], "why": None} for pickled in pickles])
            self.made = state["made"]
        return pickles is not None

    def _ask_all(self, command: int, arguments: Sequence[Any]) -> list[Any]:
        """Send a command to each process and return the replies; no process may have a pending request."""
        for env, argument in enumerate(arguments):
            self._processes.ask(env, command, argument)
        self._processes.wait_for_all()
        self._processes.check()
        return [answer for _, answers in self._processes.receive(len(arguments)) for _, answer in answers]

    def close(self) -> None:
        """Wait for steps in flight and close the environments; kill processes that still run after ten seconds."""
        self._processes.close()
        self._shared.close()


def _common_spaces(spaces: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    first = spaces[0]
    order = SpaceLayout(first[0]).names
    for env, (observations, actions) in enumerate(spaces):
        check_space(names.OBS, env, observations, first[0])
        check_space(names.ACTIONS, env, actions, first[1])
        if SpaceLayout(observations).names != order:
            raise EnvironmentSpecError(
                f"environments must have observation parts in the order of environment 0, {order}, got "
                f"{SpaceLayout(observations).names} from environment {env}"
            )
    return first

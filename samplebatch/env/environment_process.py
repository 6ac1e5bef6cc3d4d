"""Child processes: start, supervision and end of any, and the main function of environment processes.

Environment processes execute the requests of their parent process.

A message of the process is one byte, which is set if another message follows without a request, and a pickle. A request
is a pickle of a command and its arguments.

===========  ============================  ===========================================================================
command      arguments                     answer
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

"left" are the leaves of the observation that are not in shared memory. After an error, the answer is `FAILED`:
whether a value was rejected, the error text, the pickled error if possible, and the traceback.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple, Self

import numpy as np

from samplebatch import names
from samplebatch.column.casting import BOOL, FLOAT, exact_number
from samplebatch.env.environment_state import SavedEnvironments, load_environments, save_environments
from samplebatch.env.infos import Rows
from samplebatch.env.registry import environment_kind, make_environment
from samplebatch.env.spaces import Leaf, SpaceLayout
from samplebatch.errors import EnvironmentSpecError
from samplebatch.transport.peers import UNGUARDED_STATUS, begin_child, exit_if_unguarded, interrupts_blocked
from samplebatch.transport.region import Region

_GUARD_ADVICE: Final = (
    "put the statements of the main module that start processes under "
    '`if __name__ == "__main__":`, because each process imports that module'
)


def start_child(
    context: Any, target: Callable[..., None], args: tuple[Any, ...], *, name: str, must: str
) -> BaseProcess:
    """Start a process that ignores Ctrl-C, which this process handles.

    - `context`: multiprocessing context of a start method.
    - `target`, `args`, `name`: arguments of `Process`.
    - `must`: start of the error message if the arguments cannot be pickled.

    Raises EnvironmentSpecError if the arguments cannot be pickled.
    """
    exit_if_unguarded()
    process: BaseProcess = context.Process(target=target, args=args, name=name)
    try:
        with interrupts_blocked():
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EnvironmentSpecError(f"{must}: {error}") from error
    return process


class ChildExit(NamedTuple):
    """Exit status of a process (None while it runs), a description of its end, and advice or an empty string."""

    status: int | None
    how: str
    advice: str


def wait_for_exit(process: BaseProcess, timeout_s: float) -> ChildExit:
    """Wait for a process to exit and describe its end."""
    process.join(timeout_s)
    status = process.exitcode
    return ChildExit(status, describe_exit(status), _GUARD_ADVICE if status == UNGUARDED_STATUS else "")


def end_children(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Terminate processes; kill processes that are still alive after `timeout_s` seconds."""
    for end in ("terminate", "kill"):
        running = [process for process in processes if process.is_alive()]
        for process in running:
            getattr(process, end)()
        for process in running:
            process.join(timeout_s)


def describe_exit(status: int | None) -> str:
    """Describe how a process ended, from its exit status; None if it is still running.

    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'exited with status 3')
    """
    if status is None:
        return "closed its stream"
    if status == UNGUARDED_STATUS:
        return "imported the main module, which starts processes when it is imported"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


NEW_OBS, FIRST_OBS = range(2)
"""Slots of each environment: for the observation of a step, and for the observation of a reset."""

_ALIGNMENT = 64

Left = list[Any] | None
"""Leaves of an observation that are not in shared memory, None for the others; None if all are in memory."""


class SharedObservations:
    """Shared memory with two observation slots per environment, used by both ends of a pipe.

    A process writes an observation before it sends its message, and the parent reads it before it requests the next
    step, so no lock is needed. Leaves that are not numeric, and values wider than their space's dtype, are sent by
    pipe.

    - `layout`: layout of the observations.
    - `num_envs`: number of environments.
    - `region`: memory of `nbytes` bytes; None if no leaf is numeric.

    >>> from gymnasium import spaces
    >>> layout = SpaceLayout(spaces.Dict(eye=spaces.Box(-1, 1, (2,)), mouth=spaces.Text(9)))
    >>> memory = SharedObservations.create(layout, 3)
    >>> left = memory.write(1, NEW_OBS, [np.ones((1, 2), np.float32), np.array(["hello"], object)])
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
        """Return the number of bytes for observations of a layout."""
        leaves = [space for space in layout.spaces if layout.is_numeric(space)]
        counts = [2 * num_envs * space.dtype.itemsize * int(np.prod(space.shape)) for space in leaves]
        return sum(-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts)

    def write(self, env: int, slot: int, leaves: Sequence[Leaf]) -> Left:
        """Write the observation of an environment, and return the leaves to send by pipe.

        - `env`: number of the environment.
        - `slot`: `NEW_OBS` or `FIRST_OBS`.
        - `leaves`: leaves of the observation, shape (1, ...) each.
        """
        left: list[Any] = [None] * len(leaves)
        fits = True
        for number, (shared, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if shared is not None and shared.dtype == leaf.dtype:
                shared[env, slot] = leaf[0]
            else:
                left[number], fits = leaf, False
        return None if fits else left

    def read(self, envs: Rows, slot: int, sent: Sequence[Left]) -> list[Leaf]:
        """Return observations of environments, leaf by leaf, in newly allocated memory.

        - `envs`: environments, shape (k,), k at least 1.
        - `slot`: `NEW_OBS` or `FIRST_OBS`.
        - `sent`: return values of `write`, by environment.
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
    - `index`: number of the environment, for errors.
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
    """Environment of this process, and the commands of `run_environment`."""

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
        """Execute a command and yield its answers."""
        try:
            yield from self._commands[command](argument)
        except Exception as error:
            yield _failure(error)

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
        """Close the environment; errors are suppressed, because no peer can receive them."""
        if self._env is not None:
            with contextlib.suppress(Exception):
                self._env.close()


def _message(kind: int, *answer: Any, more: bool = False) -> bytes:
    return (MORE if more else LAST) + pickle.dumps((kind, *answer), pickle.HIGHEST_PROTOCOL)


def _failure(error: Exception) -> bytes:
    refused = isinstance(error, EnvironmentSpecError)
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = None
    words = str(error) if refused else f"raised {type(error).__name__}: {error}"
    return _message(FAILED, refused, words, pickled, traceback.format_exc())


class SingleStep(NamedTuple):
    """One step of one environment: the result of `EnvironmentStepper.step`.

    - `new_obs`: leaves of the observation, shape (1, ...) each.
    - `reward`, `terminated`, `truncated`: a float and two flags, of Python's or NumPy's types.
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
    """A Gymnasium environment whose values are converted exactly before they are returned.

    The returned arrays are owned by the caller: the environment may overwrite its own.

    - `env`: a `gymnasium.Env`.
    - `index`: number of the environment, for errors.

    Its attributes:
    - `env`: the environment.
    - `observations`, `actions`: layouts of its spaces.

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
        self._made = 0
        self._resets = True

    def reset(self, **arguments: Any) -> tuple[Sequence[Leaf], dict[str, Any]]:
        """Reset the environment on request, and restart the step count for errors.

        - `**arguments`: arguments of the environment's `reset`.
        """
        self._made = 0
        return self.begin_episode(**arguments)

    def begin_episode(self, **arguments: Any) -> tuple[Sequence[Leaf], dict[str, Any]]:
        """Reset the environment after an episode; like `reset`, but the step count continues."""
        self._resets = True
        obs, info = self.env.reset(**arguments)
        return self._flatten(obs), dict(info)

    def step(self, action: Any) -> SingleStep:
        """Step the environment.

        - `action`: action, with the structure of its space.
        """
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._resets = False
        self._made += 1
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
        after = f"the reset after step {self._made}" if self._made else "a reset"
        where = after if self._resets else f"step {self._made}"
        return EnvironmentSpecError(f"{sentence} from environment {self._index} in {where}")

"""The main function of an environment's process: it steps one environment, as the process that started it asks by pipe.

A message of the process is a byte, which says whether another message follows without being asked for, and a pickle. A
request is a pickle of a command and its arguments.

===========  ============================  ===========================================================================
command      arguments                     answer
===========  ============================  ===========================================================================
`MAKE`       none; each process begins     `SPACES`: the observation space and the action space
             with it
`SHARE`      num_envs, nbytes              none; the descriptor of shared memory follows on the pipe
`RESET`      keyword arguments             `BEGUN`: left, info
`STEP`       the action                    `STEPPED`: left, reward, terminated, truncated, info; where the episode ended
                                           `BEGUN` follows, once the environment is reset
`RENDER`     none                          `RENDERED`
`SAVE`       none                          `SAVED`: the environment, see `save_environments`
`LOAD`       what `SAVED` brought          `SAVED`: None
===========  ============================  ===========================================================================

"left" are the leaves of the observation that do not lie in shared memory. `FAILED` stands in the place of every answer:
whether a value was refused, the error in words, the error itself in a pickle if it has one, and the traceback.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import numpy as np

from samplebatch import names
from samplebatch.column.casting import BOOL, FLOAT, exact_number
from samplebatch.env.environment_state import SavedEnvironments, load_environments, save_environments
from samplebatch.env.infos import Rows
from samplebatch.env.registry import environment_kind, make_environment
from samplebatch.env.spaces import Leaf, SpaceLayout
from samplebatch.errors import EnvironmentSpecError
from samplebatch.transport.peers import begin_child
from samplebatch.transport.region import Region

NEW_OBS, FIRST_OBS = range(2)
"""The places that each environment has: for the observation of a step, and for that of a reset."""

_ALIGNMENT = 64

Left = list[Any] | None
"""Leaves of an observation that do not fit into the memory, None in place of the others; None if all fit."""


class SharedObservations:
    """Two places in shared memory for the observations of each environment, for both ends of a pipe.

    A process writes an observation before it sends its message, and the parent reads it before it asks for the next
    step, so nothing is locked. Leaves that are no numbers, and values of a wider dtype than their space, go by pipe.

    Parameters
    ----------
    layout
        The layout of the observations.
    num_envs
        How many environments there are.
    region
        Memory of `nbytes` bytes; None where no leaf is numeric.

    Examples
    --------
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
        """Make the memory that observations of a layout need."""
        nbytes = cls.nbytes(layout, num_envs)
        return cls(layout, num_envs, Region.create(nbytes) if nbytes else None)

    @staticmethod
    def nbytes(layout: SpaceLayout, num_envs: int) -> int:
        """Count the bytes that observations of a layout need."""
        leaves = [space for space in layout.spaces if layout.is_numeric(space)]
        counts = [2 * num_envs * space.dtype.itemsize * int(np.prod(space.shape)) for space in leaves]
        return sum(-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts)

    def write(self, env: int, place: int, leaves: Sequence[Leaf]) -> Left:
        """Write the observation of an environment, and return the leaves that have to be sent.

        Parameters
        ----------
        env
            The environment.
        place
            `NEW_OBS` or `FIRST_OBS`.
        leaves
            The leaves, each of shape (1, ...).
        """
        left: list[Any] = [None] * len(leaves)
        fits = True
        for number, (own, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if own is not None and own.dtype == leaf.dtype:
                own[env, place] = leaf[0]
            else:
                left[number], fits = leaf, False
        return None if fits else left

    def read(self, envs: Rows, place: int, sent: Sequence[Left]) -> list[Leaf]:
        """Return observations of environments, leaf by leaf, in memory of their own.

        Parameters
        ----------
        envs
            The environments, shape (k,), k at least 1.
        place
            `NEW_OBS` or `FIRST_OBS`.
        sent
            By environment, the leaves that `write` returned.
        """
        found: list[Leaf] = []
        for number, own in enumerate(self._leaves):
            parts = [None if left is None else left[number] for left in sent]
            if own is not None and all(part is None for part in parts):
                found.append(own[envs, place])
                continue
            held: Any = own
            found.append(
                np.concatenate(
                    [held[env, place][None] if part is None else part for env, part in zip(envs, parts, strict=True)]
                )
            )
        return found

    def close(self) -> None:
        """Let go of the memory."""
        self._leaves = []
        if self.region is not None:
            self.region.close()


MAKE, SHARE, RESET, STEP, RENDER, SAVE, LOAD = range(7)
SPACES, BEGUN, STEPPED, RENDERED, SAVED, FAILED = range(6)

LAST, MORE = b"\0", b"\1"


def run_environment(pipe: Connection, make: Callable[[], Any], index: int) -> None:
    """Make an environment, and answer requests until the other end of the pipe is closed.

    Parameters
    ----------
    pipe
        The end of the pipe that requests come by.
    make
        Makes the environment.
    index
        The number of the environment, which errors name.
    """
    # A forked child has the handlers of its parent.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    begin_child()
    service = _Service(pipe, make, index)
    command, given = MAKE, None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            for message in service.answer(command, given):
                pipe.send_bytes(message)
            command, given = pickle.loads(pipe.recv_bytes())
    service.close()


class _Service:
    """The environment of this process, for `run_environment`, and the commands that are carried out on it."""

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

    def answer(self, command: int, given: Any) -> Iterator[bytes]:
        """Carry out a command, and yield the messages that answer it."""
        try:
            yield from self._commands[command](given)
        except Exception as error:
            yield _failure(error)

    def _make_environment(self, _: None) -> Iterator[bytes]:
        self._env = env = make_environment(self._make)
        if environment_kind(env) != "gymnasium":
            raise EnvironmentSpecError(f"environment {self._index} must be a gymnasium.Env, got a {type(env).__name__}")
        self._stepper = EnvironmentStepper(env, self._index)
        self._observations = SharedObservations(self._stepper.observations, 0, None)
        yield _message(SPACES, env.observation_space, env.action_space)

    def _share(self, given: tuple[int, int]) -> Iterable[bytes]:
        num_envs, nbytes = given
        with Region.attach(reduction.recv_handle(self._pipe), nbytes) as region:
            self._observations = SharedObservations(self._stepper.observations, num_envs, region)
        return ()

    def _reset(self, given: dict[str, Any]) -> Iterator[bytes]:
        yield self._tell_begun(*self._stepper.reset(**given))

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
        """Close the environment; there is nobody to tell an error to."""
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
    """One step of one environment, as `EnvironmentStepper.step` returns it to adapters.

    Attributes
    ----------
    new_obs
        The leaves of the observation, each of shape (1, ...).
    reward, terminated, truncated
        A float and two flags, Python's or NumPy's.
    info
        The info, in a dict of its own.
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
    """A Gymnasium environment in its process, with values that are converted exactly before they leave it.

    The arrays that it returns are their caller's: the environment may write to its own again.

    Parameters
    ----------
    env
        A `gymnasium.Env`.
    index
        The number of the environment, which errors name.

    Attributes
    ----------
    env
        As given.
    observations, actions
        The layouts of its spaces.

    Examples
    --------
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

    def reset(self, **given: Any) -> tuple[Sequence[Leaf], dict[str, Any]]:
        """Reset the environment on demand, and count its steps from 1 again.

        Parameters
        ----------
        **given
            Arguments of the environment's own `reset`.
        """
        self._made = 0
        return self.begin_episode(**given)

    def begin_episode(self, **given: Any) -> tuple[Sequence[Leaf], dict[str, Any]]:
        """Reset the environment after an episode; see `reset`, but steps are counted on."""
        self._resets = True
        obs, info = self.env.reset(**given)
        return self._flatten(obs), dict(info)

    def step(self, action: Any) -> SingleStep:
        """Step the environment.

        Parameters
        ----------
        action
            An action, nested as its space has it.
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
        """Make the error for a value of the newest step or reset."""
        after = f"the reset after step {self._made}" if self._made else "a reset"
        where = after if self._resets else f"step {self._made}"
        return EnvironmentSpecError(f"{sentence} from environment {self._index} in {where}")

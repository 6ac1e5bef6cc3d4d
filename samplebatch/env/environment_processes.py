"""EnvironmentProcesses: the processes of Gymnasium's AsyncVectorEnv, asked and heard one by one.

Gymnasium asks all of them and waits for all. But each has a pipe of its own, and answers when it is done.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.env.exit_status import how_it_ended
from samplebatch.errors import EnvironmentSpecError, WorkerError, require
from samplebatch.transport.peers import Poller

_LOOK_EVERY_S = 1.0
"""How often a process that does not answer is looked at."""
_REASON_WITHIN_S = 5.0
"""How long a process that failed may take to say why."""
_CLOSE_WITHIN_S = 10.0
"""How long processes may take to come to their end when they are closed."""

_NEEDED = (
    "parent_pipes",
    "processes",
    "error_queue",
    "shared_memory",
    "observations",
    "autoreset_mode",
    "single_observation_space",
    "single_action_space",
    "close_extras",
    "closed",
    "_state",
)
_OWN_WAYS = ("step", "step_async", "step_wait", "reset", "reset_async", "reset_wait")


class _Collecting:
    """The state of an AsyncVectorEnv some of whose environments are under way; it knows only those of them all."""

    value = "collect"


class EnvironmentProcesses:
    """The processes in which the environments of an AsyncVectorEnv run.

    As long as one of them is under way, Gymnasium's own methods refuse to ask them anything.

    Parameters
    ----------
    env
        An AsyncVectorEnv.

    Attributes
    ----------
    asked
        Those which have not answered yet, by their environments' numbers.

    Raises
    ------
    EnvironmentSpecError
        If it is not an AsyncVectorEnv itself, is closed or waited for, or not as Gymnasium 1 has them.
    """

    def __init__(self, env: Any) -> None:
        _check(env)
        self._env = env
        self._pipes: list[Connection] = list(env.parent_pipes)
        self._index_of = {pipe.fileno(): index for index, pipe in enumerate(self._pipes)}
        self._poller = Poller(*self._index_of)
        self.asked: set[int] = set()
        self._answers: dict[int, Any] = {}
        self._midst: int | None = None
        self._failure: WorkerError | None = None
        self._idle, self._collecting = env._state, _Collecting()
        # Gymnasium calls the method of that name when it is to close an environment that is waited for.
        env.collect_wait = partial(_heard_out, self._pipes, self.asked)

    @property
    def under_way(self) -> Collection[int]:
        """Those whose answers have not been handed out."""
        return self.asked | self._answers.keys()

    def check(self) -> None:
        """Tell of a failure.

        Raises
        ------
        WorkerError
            If a process has failed or ended, or an exchange with one was interrupted.
        EnvironmentSpecError
            If somebody else has closed the environments.
        """
        if self._failure is not None:
            raise self._failure
        if self._midst is not None:
            raise WorkerError(
                f"an exchange with environment {self._midst} must be whole, and was interrupted; close the "
                "environments and make them anew"
            )
        if self._env.closed:
            raise EnvironmentSpecError("env must be open, and has been closed")

    def ask(self, index: int, command: str, data: Any) -> None:
        """Ask a process something that it has to answer.

        Raises
        ------
        WorkerError
            If one of the processes has failed or ended.
        """
        self.check()
        self._env._state = self._collecting
        self._midst = index
        try:
            self._pipes[index].send((command, data))
        except ConnectionError:
            self._midst = None
            # It may have left word of why.
            self._take(index)
            self.check()
        except Exception:
            # Nothing was sent of what cannot be pickled.
            self._midst = None
            raise
        else:
            self.asked.add(index)
            self._midst = None

    def receive(
        self, least: int, timeout_s: float | None = None, among: npt.NDArray[np.bool_] | None = None
    ) -> list[tuple[int, Any]]:
        """Wait for answers, and return all that there are.

        Parameters
        ----------
        least
            How many to wait for, if so many are expected.
        timeout_s
            Seconds after which fewer do, if there is any.
        among
            Whether to wait for each process, shape (num_envs,); answers of others are kept for later. None for all.

        Returns
        -------
        Numbers of environments, ascending, with what each answered.

        Raises
        ------
        WorkerError
            If a process failed, ended or answered what it was not asked; once the answers of others are handed out.
        """
        expected = self.under_way if among is None else [index for index in self.under_way if among[index]]
        least = min(least, len(expected))
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        self._listen(0.0)
        while True:
            found = sorted(index for index in self._answers if among is None or among[index])
            left = None if give_up is None else give_up - time.monotonic()
            late = self._failure is not None or self._midst is not None or (left is not None and left <= 0)
            if not found:
                self.check()
            if len(found) >= least or (found and late):
                break
            self._listen(_LOOK_EVERY_S if left is None or left <= 0 else min(left, _LOOK_EVERY_S))
        given = [(index, self._answers.pop(index)) for index in found]
        if not self.asked and not self._answers:
            self._env._state = self._idle
        return given

    def _listen(self, patience_s: float) -> None:
        """Take the answers that are there, or that come first within so many seconds."""
        if self._midst is not None:
            return
        ready = self._poller.poll(patience_s)
        for descriptor in ready:
            self._take(self._index_of[descriptor])
        if patience_s and not ready:
            # A process that it has started itself may hold its end of the pipe open.
            for index in sorted(self.asked):
                if not self._env.processes[index].is_alive() and not self._pipes[index].poll(0):
                    self._ended(index)

    def _take(self, index: int) -> None:
        """Take an answer, or notice that there will be none."""
        self._midst = index
        try:
            answer, fine = self._pipes[index].recv()
        except (EOFError, ConnectionError):
            self._ended(index)
        except Exception as error:
            self._fail(index, "gave an answer that cannot be read", error)
        else:
            if not fine:
                self._fail(index, *self._reason(index))
            elif index not in self.asked:
                self._fail(index, "answered what it was not asked here")
            else:
                self.asked.discard(index)
                self._answers[index] = answer
        self._midst = None

    # Failures

    def _reason(self, index: int) -> tuple[str, Any, str]:
        """Return what the process of an environment said of its failure."""
        until = time.monotonic() + _REASON_WITHIN_S
        while True:
            try:
                number, kind, value, trace = self._env.error_queue.get(timeout=max(0.0, until - time.monotonic()))
            except Exception as error:
                return "raised what cannot be told", error, ""
            if number == index:
                return f"raised {kind.__name__}: {value}", value, trace

    def _ended(self, index: int) -> None:
        process = self._env.processes[index]
        process.join(_LOOK_EVERY_S)
        self._fail(index, f"its process {process.pid} {how_it_ended(process.exitcode)}")

    def _fail(self, index: int, how: str, cause: BaseException | None = None, trace: str = "") -> None:
        """Word what happened to an environment, and let go of its process, which has ended by then."""
        error = WorkerError(
            f"environment {index} must answer until it is closed, and {how}; make the environments anew"
        )
        error.__cause__ = cause
        if trace:
            error.add_note(trace)
        self.asked.discard(index)
        if not self._pipes[index].closed:
            self._poller.unregister(self._pipes[index].fileno())
            self._pipes[index].close()
        # As Gymnasium marks those of which nothing more can be expected.
        self._env.parent_pipes[index] = None
        # The first failure is what the others may follow from.
        self._failure = self._failure or error

    # The end

    def close(self) -> None:
        """Wait for what is under way, close the environments, and end the processes, those that hang by force."""
        env = self._env
        if env.closed:
            self._poller.close()
            return
        until = time.monotonic() + _CLOSE_WITHIN_S
        torn = self._midst
        whole = [index for index, pipe in enumerate(self._pipes) if index != torn and not pipe.closed]
        if torn is not None:
            env.processes[torn].terminate()
        for index in whole:
            with suppress(OSError):
                self._pipes[index].send(("close", None))
        heard = set()
        for index in whole:
            # Whatever it says, and whether it can be read or not: it has been told.
            with suppress(Exception):
                for _ in range(1 + (index in self.asked)):
                    if self._pipes[index].poll(max(0.0, until - time.monotonic())):
                        self._pipes[index].recv()
                        heard.add(index)
        for index, process in enumerate(env.processes):
            process.join(max(_LOOK_EVERY_S if index in heard else 0.0, until - time.monotonic()))
            for end in (process.terminate, process.kill):
                if process.is_alive():
                    end()
                    process.join(_LOOK_EVERY_S)
        self.asked.clear()
        self._poller.close()
        env._state = self._idle
        env.close(terminate=True)


def _heard_out(pipes: Sequence[Connection], asked: set[int], timeout: float | None = None) -> None:
    """Wait for what is under way, on behalf of Gymnasium; what it was is lost.

    Raises
    ------
    multiprocessing.TimeoutError
        If it takes longer than so many seconds: Gymnasium ends the processes then.
    """
    until = None if timeout is None else time.monotonic() + timeout
    for index in sorted(asked):
        if not pipes[index].poll(None if until is None else max(0.0, until - time.monotonic())):
            raise multiprocessing.TimeoutError(f"environment {index} has not answered within {timeout} s")
        # When Python exits, processes may have been ended before.
        with suppress(EOFError, ConnectionError):
            pipes[index].recv()
        asked.discard(index)


def _check(env: Any) -> None:
    vector = require("gymnasium.vector", "envs")
    kind = type(env).__name__
    must = "env must be a gymnasium.vector.AsyncVectorEnv, whose environments are stepped one by one"
    if isinstance(env, vector.VectorWrapper):
        raise EnvironmentSpecError(f"{must}, got a {kind} around one; wrap the single environments instead")
    if not isinstance(env, vector.AsyncVectorEnv):
        raise EnvironmentSpecError(f"{must}, got a {kind}; use Collector, which steps environments together")
    for name in _NEEDED:
        if not hasattr(env, name):
            version = require("gymnasium", "envs").__version__
            raise EnvironmentSpecError(
                f"{must}, and that of gymnasium {version} has no {name!r}, by which that is done; use Collector, or "
                "gymnasium 1.2"
            )
    for name in _OWN_WAYS:
        if getattr(type(env), name) is not getattr(vector.AsyncVectorEnv, name):
            raise EnvironmentSpecError(
                f"{must}, got a {kind} with a {name} of its own, which would not be called; use Collector, or wrap the "
                "single environments instead"
            )
    if env.closed:
        raise EnvironmentSpecError("env must be open, and has been closed")
    if getattr(env._state, "value", None) != "default":
        raise EnvironmentSpecError(
            f"env must not be waited for, and has a call of {env._state.value!r} pending; wait for that first"
        )

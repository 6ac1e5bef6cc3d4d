"""EnvironmentProcesses: one process for each environment, each asked and heard when it is ready."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.env.environment_process import FAILED, MORE, SHARE, run_environment
from samplebatch.env.exit_status import describe_exit
from samplebatch.errors import EnvironmentSpecError, SampleBatchError, WorkerError
from samplebatch.transport.children import interrupts_blocked
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

    Raises
    ------
    EnvironmentSpecError
        If a function cannot be sent to another process.
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
            with interrupts_blocked():
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
            process = context.Process(
                target=run_environment, args=(theirs, _Maker(make), index), name=f"environment-{index}"
            )
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise EnvironmentSpecError(
                    f"environments are made in other processes, and environment {index} must be given as an id or a "
                    f"function that can be pickled: {error}"
                ) from error
        self.processes.append(process)

    @property
    def under_way(self) -> int:
        """How many processes were asked, and their answers not handed out."""
        return len(self._asked.keys() | self._answers.keys())

    def share(self, region: Region, num_envs: int) -> None:
        """Give all processes shared memory for the observations of `num_envs` environments.

        Raises
        ------
        WorkerError
            If a process has ended.
        """
        for index, (pipe, process) in enumerate(zip(self._pipes, self.processes, strict=True)):
            try:
                pipe.send_bytes(pickle.dumps((SHARE, (num_envs, region.nbytes))))
                reduction.send_handle(pipe, region.fileno(), process.pid)
            except ConnectionError:
                self._lose_ended(index)
        self.check()

    def check(self) -> None:
        """Tell of a failure; of one that a process survives only once.

        Raises
        ------
        WorkerError
            If a process is lost, or an environment has raised.
        EnvironmentSpecError
            If an environment returned a value that was refused.
        """
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
        """Ask a process to carry out a command.

        Raises
        ------
        WorkerError, EnvironmentSpecError
            As `check` does.
        """
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

        Returns
        -------
        Numbers of environments, ascending, with the answers of each in their order.

        Raises
        ------
        WorkerError, EnvironmentSpecError
            As `check` does, once the answers of others are handed out.
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
        process.join(_LOOK_EVERY_S)
        self._lose(index, f"its process {process.pid} {describe_exit(process.exitcode)}")

    def _lose(self, index: int, how: str) -> None:
        """Word how a process was lost, and expect nothing more of it."""
        self._asked.pop(index, None)
        if self._index_of.pop(self._pipes[index].fileno(), None) is not None:
            self._poller.unregister(self._pipes[index].fileno())
        # The first loss is what others may follow from.
        self._lost = self._lost or WorkerError(
            f"environment {index} must answer until it is closed, and {how}; close the collector, and make another"
        )

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
    for end in ("terminate", "kill"):
        running = [process for process in processes if process.is_alive()]
        for process in running:
            getattr(process, end)()
        for process in running:
            process.join(_LOOK_EVERY_S)
    for pipe in pipes:
        pipe.close()

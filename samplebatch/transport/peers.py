"""Peers: the processes at the other ends, whether they still run, and waiting for them.

A process that is killed while it starts has not declared that it has an end. Its parent knows: with `fork` from the
arguments of the process that it starts, otherwise because it pickles the end for that process (`Recipient`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import context, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple, Self

from samplebatch.errors import EnvironmentSpecError

_HAS_EPOLL: Final = sys.platform == "linux"
_monotonic = time.monotonic
_PROC = Path("/proc")
_MAX_PID = (1 << 31) - 1
"""No process has a higher number: a header with a higher one is damaged."""


class ProcessIdentity(NamedTuple):
    """Process identity that survives PID reuse.

    - `pid`: its number.
    - `started`: start time in the system's ticks since boot; 0 if the system does not provide it.
    """

    pid: int
    started: int

    @classmethod
    def own(cls) -> Self:
        """Return the calling process's identity.

        >>> ProcessIdentity.own().pid == os.getpid()
        True
        """
        pid = os.getpid()
        return cls(pid, (_state_of(pid) or ("", 0))[1])


class ProcessWatch:
    """A process that the end of a channel or broadcast watches.

    Where there are descriptors of processes it holds one, which is readable once the process has ended.

    - `identity`: identity of the process, as the process declared it.

    >>> watch = ProcessWatch(ProcessIdentity.own())
    >>> watch.is_alive()
    True
    >>> watch.close()
    >>> ProcessWatch(ProcessIdentity(os.getpid(), started=1)).is_alive()
    False
    """

    def __init__(self, identity: ProcessIdentity) -> None:
        self.identity = identity
        self._descriptor = _open(identity.pid)
        # Asked after opening: what is open now is this process, or it is gone.
        self._is_over = not _is_there(identity)

    def fileno(self) -> int:
        """Return the descriptor, or -1 if there is none."""
        return self._descriptor

    def is_alive(self) -> bool:
        """Return whether the process still runs; False for a zombie."""
        if not self._is_over:
            self._is_over = self._has_ended()
        return not self._is_over

    def _has_ended(self) -> bool:
        if self._descriptor < 0:
            return not _is_there(self.identity)
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptor; `is_alive` may still be asked."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()


def is_alive(identity: ProcessIdentity) -> bool:
    """Return whether a process still runs, without watching it further.

    >>> is_alive(ProcessIdentity.own()), is_alive(ProcessIdentity(os.getpid(), started=1))
    (True, False)
    """
    return _is_there(identity)


def _open(pid: int) -> int:
    if not hasattr(os, "pidfd_open") or not 0 < pid <= _MAX_PID:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        # It has ended, the kernel has no such descriptors, or there are too many: asking by number does as well.
        return -1


def _is_there(identity: ProcessIdentity) -> bool:
    if not 0 < identity.pid <= _MAX_PID:
        return False
    has_states = _PROC.joinpath("self/stat").exists()
    if not has_states:
        # A dead child exists until its parent waits for it; this waits for the dead children of `multiprocessing`.
        multiprocessing.active_children()
    try:
        os.kill(identity.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process belongs to another user, so it exists.
        pass
    process_state = _state_of(identity.pid)
    if process_state is None:
        return not has_states
    state, started = process_state
    return state not in "ZX" and identity.started in (0, started)


def _state_of(pid: int) -> tuple[str, int] | None:
    """Return a process's state and start time; None if it is gone or the system does not provide them."""
    try:
        line = _PROC.joinpath(str(pid), "stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, precedes them and may contain any characters.
    fields = line[line.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


class Recipient:
    """A process that an end was given to when it was started, as its parent sees it.

    - `started`: an object that `multiprocessing` keeps for as long as the process runs.
    """

    def __init__(self, started: Any) -> None:
        self._started = weakref.ref(started)

    @classmethod
    def find_spawning(cls) -> Self | None:
        """Find the process that is being pickled for; None if there is none."""
        spawning = context.get_spawning_popen()
        return None if spawning is None else cls(spawning)

    def has_ended(self) -> bool:
        """Return whether the process has ended, or could not be started."""
        started = self._started()
        if started is None:
            return True
        try:
            pid = getattr(started, "pid", None)
        except ValueError:
            # A process that is closed has ended before.
            return True
        return pid is not None and not is_alive(ProcessIdentity(pid, started=0))


def find_forking() -> BaseProcess | None:
    """Find the process that `start` is forking in this thread; None if there is none."""
    frame = sys._getframe()
    while frame.f_code is not BaseProcess.start.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    process: BaseProcess = frame.f_locals["self"]
    return process


def arguments_of(started: BaseProcess) -> Iterator[Any]:
    """Yield the objects that a process was created with: its arguments, and the attributes of a subclass."""
    yield from getattr(started, "_args", ())
    yield from getattr(started, "_kwargs", {}).values()
    yield from list(vars(started).values())


class Transferable(ABC):
    """An end that one process has, and that records the process it is given to."""

    @abstractmethod
    def _give(self, recipient: Recipient | None) -> bool:
        """Record that a process that may not run yet receives the end; return whether that was possible."""


def _give_to_child() -> None:
    """Record which ends are inherited by a process that is about to be forked."""
    started = find_forking()
    if started is not None:
        for value in arguments_of(started):
            if isinstance(value, Transferable):
                value._give(Recipient(started))


os.register_at_fork(before=_give_to_child)


class Poller:
    """Descriptors to wait for until one of them is readable.

    - `*descriptors`: initial descriptors; more can be registered.

    >>> import os
    >>> reader, writer = os.pipe()
    >>> poller = Poller(reader)
    >>> poller.poll(0.0)
    []
    >>> _ = os.write(writer, b"x")
    >>> poller.poll(None) == [reader]
    True
    >>> poller.close(), os.close(reader), os.close(writer)
    (None, None, None)
    """

    def __init__(self, *descriptors: int) -> None:
        self._first = descriptors[0] if descriptors else -1
        self._poll: Any = select.epoll() if _HAS_EPOLL else select.poll()
        for descriptor in descriptors:
            self.register(descriptor)

    def register(self, descriptor: int) -> None:
        """Wait on one more."""
        self._poll.register(descriptor, select.POLLIN)

    def replace(self, descriptor: int, other: int) -> None:
        """Wait on another descriptor in place of one."""
        self.unregister(descriptor)
        self.register(other)
        if self._first == descriptor:
            self._first = other

    def unregister(self, descriptor: int) -> None:
        """Stop waiting for a descriptor."""
        self._poll.unregister(descriptor)

    def poll(self, timeout_s: float | None) -> list[int]:
        """Wait until descriptors are readable, for `timeout_s` seconds at most, and return them."""
        if timeout_s is None:
            events = self._poll.poll()
        else:
            events = self._poll.poll(timeout_s if _HAS_EPOLL else timeout_s * 1000)
        return [*dict(events)]

    def wait(self, timeout_s: float) -> None:
        """Wait as `poll` does, without returning the descriptors."""
        self._poll.poll(timeout_s if _HAS_EPOLL else timeout_s * 1000)

    def fileno(self) -> int:
        """Return a descriptor that is readable when one of them is; without epoll, the first of them."""
        return int(self._poll.fileno()) if _HAS_EPOLL else self._first

    def close(self) -> None:
        """Unregister all descriptors; they stay open."""
        if _HAS_EPOLL:
            self._poll.close()


def deadline_of(timeout_s: float | None) -> float | None:
    """Return the moment at which the time given is over, in seconds of the monotonic clock; None if it never is.

    Raises ValueError if the time is negative or no number.

    >>> deadline_of(0.0) <= time.monotonic()
    True
    >>> deadline_of(float("nan"))
    Traceback (most recent call last):
    ValueError: timeout_s must be None or a number of seconds from 0 on, got nan
    """
    if timeout_s is None:
        return None
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s must be None or a number of seconds from 0 on, got {timeout_s}")
    return _monotonic() + timeout_s


UNGUARDED_STATUS: Final = 167
"""Exit status of a child that is to start processes itself while it imports its parent's main module."""


def exit_if_unguarded() -> None:
    """End a child that imports its parent's main module to start, where that module starts processes on import.

    The parent raises a single error: otherwise each child would print one, and its own children another.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A fork server loses the status of `SystemExit`.
        sys.stdout.flush()
        os._exit(UNGUARDED_STATUS)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Hold Ctrl-C back while children start: they inherit that, and are deaf to it before they can ask to be."""
    # The tracker of `multiprocessing` unblocks SIGINT when it starts, so it must run before that is blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_child() -> None:
    """Leave Ctrl-C to the parent from here on, and end as soon as that is gone, however it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


_run_errors: list[BaseException] = []
"""The exception that ended the `run` of this process of `multiprocessing`, if any."""


def exit_error() -> BaseException | None:
    """Return the exception that ends this process, for handlers that run at its exit; None if it exits in order."""
    error = sys.exc_info()[1] or next(iter(_run_errors), None)
    if error is None and multiprocessing.parent_process() is None:
        # A forked child inherits the attribute from an interactive session.
        error = getattr(sys, "last_value", None)
    return error


def _record_run_errors() -> None:
    """Let processes of `multiprocessing` retain the exception that ends their `run`.

    Up to Python 3.12 the handlers of a process run while that exception is handled. From 3.13 on they run after it was
    freed, and with it the frames whose local variables are ends of channels: a failure would look like a normal end.
    """
    bootstrap: Any = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def recording_bootstrap(self: BaseProcess, *arguments: Any, **keywords: Any) -> Any:
        run = self.run

        def record() -> None:
            # It would be pickled with the process otherwise.
            del vars(self)["run"]
            try:
                run()
            except BaseException as error:
                _run_errors.append(error)
                raise

        vars(self)["run"] = record
        return bootstrap(self, *arguments, **keywords)

    BaseProcess._bootstrap = recording_bootstrap  # type: ignore[attr-defined]


if sys.version_info >= (3, 13):

    def _record_current_run_error() -> None:
        """Retain the exception that ends the `run` that imports this module: only the interpreter sees it."""
        monitoring, code = sys.monitoring, getattr(multiprocessing.current_process().run, "__code__", None)
        tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
        if code is None or tool is None:
            return

        def record(unwound: CodeType, _offset: int, error: BaseException) -> None:
            if unwound is code:
                _run_errors.append(error)

        monitoring.use_tool_id(tool, "samplebatch")
        monitoring.register_callback(tool, monitoring.events.PY_UNWIND, record)
        monitoring.set_events(tool, monitoring.events.PY_UNWIND)

    _record_run_errors()
    if multiprocessing.parent_process() is not None:
        _record_current_run_error()


# Child processes

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

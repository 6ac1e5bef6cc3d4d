"""Identity, liveness and exit status of other processes.

A process that is killed during startup has not recorded yet that it received a channel end. Therefore the parent
process records the `Recipient` of an end. With `fork`, the parent finds the ends among the arguments of the started
process; otherwise, the parent records the recipient when it pickles the end.
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
"""Maximum process id; a header with a higher one is damaged."""


class ProcessIdentity(NamedTuple):
    """Process identity that remains unique if the system reuses the process id.

    - `pid`: process id.
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
    """Watch that detects the end of a process.

    If the system supports process descriptors, the watch owns a descriptor that is readable after the process has
    ended.

    - `identity`: identity (process id and start time) that the process has recorded.

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
        # Checked after opening: the descriptor now belongs to this process, or the process has ended.
        self._is_over = not _is_there(identity)

    def fileno(self) -> int:
        """Return the descriptor of the process, or -1 if the system does not support process descriptors."""
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
        """Close the descriptor; `is_alive` can still be called."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()


def is_alive(identity: ProcessIdentity) -> bool:
    """Return whether a process is still running, without creating a watch.

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
        # The process has ended, or the kernel provides no descriptor; `is_alive` then uses the process id.
        return -1


def _is_there(identity: ProcessIdentity) -> bool:
    if not 0 < identity.pid <= _MAX_PID:
        return False
    has_states = _PROC.joinpath("self/stat").exists()
    if not has_states:
        # A dead child exists until its parent waits for it; this call waits for all dead children.
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
    """Return a process's state and start time; None if the process has ended or the system provides neither."""
    try:
        line = _PROC.joinpath(str(pid), "stat").read_text()
    except OSError:
        return None
    # The program name in parentheses precedes the fields and may contain any characters.
    fields = line[line.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


class Recipient:
    """Parent-side handle of a started process that received a channel end.

    - `started`: object that `multiprocessing` retains while the process runs.
    """

    def __init__(self, started: Any) -> None:
        self._started = weakref.ref(started)

    @classmethod
    def find_spawning(cls) -> Self | None:
        """Return the process whose arguments `multiprocessing` is pickling; None if there is no such process."""
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
            # `Process.close` requires that the process has ended.
            return True
        return pid is not None and not is_alive(ProcessIdentity(pid, started=0))


def find_forking() -> BaseProcess | None:
    """Return the process that `Process.start` is forking in this thread; None if there is no such process."""
    frame = sys._getframe()
    while frame.f_code is not BaseProcess.start.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    process: BaseProcess = frame.f_locals["self"]
    return process


def arguments_of(started: BaseProcess) -> Iterator[Any]:
    """Yield the arguments of a process and, if its class is a subclass of `Process`, its attributes."""
    yield from getattr(started, "_args", ())
    yield from getattr(started, "_kwargs", {}).values()
    yield from list(vars(started).values())


class Transferable(ABC):
    """Channel end that is owned by one process and records the process to which it is transferred."""

    @abstractmethod
    def _give(self, recipient: Recipient | None) -> bool:
        """Record the receiving process, which may not have started yet; return False if this end has been used."""


def _give_to_child() -> None:
    """Record the ends among the arguments of a process that is about to be forked."""
    started = find_forking()
    if started is not None:
        for value in arguments_of(started):
            if isinstance(value, Transferable):
                value._give(Recipient(started))


os.register_at_fork(before=_give_to_child)


class Poller:
    """Set of file descriptors that can be awaited together.

    - `*descriptors`: initial descriptors; `register` can add further descriptors.

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
        """Add a descriptor."""
        self._poll.register(descriptor, select.POLLIN)

    def replace(self, descriptor: int, other: int) -> None:
        """Replace a descriptor."""
        self.unregister(descriptor)
        self.register(other)
        if self._first == descriptor:
            self._first = other

    def unregister(self, descriptor: int) -> None:
        """Stop waiting for a descriptor."""
        self._poll.unregister(descriptor)

    def poll(self, timeout_s: float | None) -> list[int]:
        """Wait at most `timeout_s` seconds for readable descriptors, and return the readable descriptors."""
        if timeout_s is None:
            events = self._poll.poll()
        else:
            events = self._poll.poll(timeout_s if _HAS_EPOLL else timeout_s * 1000)
        return [*dict(events)]

    def wait(self, timeout_s: float) -> None:
        """Wait for readable descriptors like `poll`, without returning the descriptors."""
        self._poll.poll(timeout_s if _HAS_EPOLL else timeout_s * 1000)

    def fileno(self) -> int:
        """Return a descriptor that is readable if any of the set is readable; without epoll, the first descriptor."""
        return int(self._poll.fileno()) if _HAS_EPOLL else self._first

    def close(self) -> None:
        """Unregister all descriptors without closing them."""
        if _HAS_EPOLL:
            self._poll.close()


def deadline_of(timeout_s: float | None) -> float | None:
    """Convert a timeout to a deadline in seconds of the monotonic clock; return None if the timeout is None.

    Raises ValueError if the timeout is negative or not a number.

    >>> deadline_of(0.0) <= time.monotonic()
    True
    >>> deadline_of(float("nan"))
    Traceback (most recent call last):
    ValueError: timeout_s must be None or a number of seconds from 0, got nan
    """
    if timeout_s is None:
        return None
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s must be None or a number of seconds from 0, got {timeout_s}")
    return _monotonic() + timeout_s


UNGUARDED_STATUS: Final = 167
"""Exit status of a child whose import of the parent's main module tries to start processes."""


def exit_if_unguarded() -> None:
    """Terminate a starting child if importing the parent's main module starts processes.

    Only the parent raises an error. Without the termination, each child and each of the child's children would print an
    error.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A fork server loses the status of `SystemExit`.
        sys.stdout.flush()
        os._exit(UNGUARDED_STATUS)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT while children start, so that the children inherit the signal mask and ignore Ctrl-C at once."""
    # The resource tracker unblocks SIGINT when it starts, so start the tracker before blocking SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_child() -> None:
    """Ignore Ctrl-C, which the parent handles, and terminate this process when the parent ends."""
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
    """Return the exception that ends this process, for use in exit handlers; None if the process exits normally."""
    error = sys.exc_info()[1] or next(iter(_run_errors), None)
    if error is None and multiprocessing.parent_process() is None:
        # A forked child inherits the attribute from an interactive session.
        error = getattr(sys, "last_value", None)
    return error


def _record_run_errors() -> None:
    """Patch `multiprocessing` so that each process retains the exception that ends its `run`.

    Up to Python 3.12, exit handlers run while the exception is handled. From Python 3.13, exit handlers run after the
    exception, its frames and their local variables, which include channel ends, are freed. Without the patch, a failure
    would therefore appear as a normal exit.
    """
    bootstrap: Any = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def recording_bootstrap(self: BaseProcess, *arguments: Any, **keywords: Any) -> Any:
        run = self.run

        def record() -> None:
            # Otherwise the attribute would be pickled with the process.
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
        """Retain the exception that ends the current `run` if `_record_run_errors` did not wrap this call to `run`."""
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
    context: Any, target: Callable[..., None], args: tuple[Any, ...], *, name: str, requirement: str
) -> BaseProcess:
    """Start a process that ignores Ctrl-C, because this process handles Ctrl-C.

    - `context`: multiprocessing context of a start method.
    - `target`, `args`, `name`: arguments of `Process`.
    - `requirement`: beginning of the error message for arguments that cannot be pickled.

    Raises EnvironmentSpecError if the arguments cannot be pickled.
    """
    exit_if_unguarded()
    process: BaseProcess = context.Process(target=target, args=args, name=name)
    try:
        with interrupts_blocked():
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EnvironmentSpecError(f"{requirement}: {error}") from error
    return process


class ChildExit(NamedTuple):
    """Exit status of a process (None while it runs), its description, and a hint, which may be empty."""

    status: int | None
    how: str
    advice: str


def wait_for_exit(process: BaseProcess, timeout_s: float) -> ChildExit:
    """Wait for a process to exit; return and describe its exit status."""
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
    """Describe how a process ended, given its exit status, which is None while the process runs.

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

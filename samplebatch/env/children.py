"""Start, supervision and termination of child processes of environments and workers."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple

from samplebatch.errors import EnvironmentSpecError
from samplebatch.transport.peers import UNGUARDED_STATUS, exit_if_unguarded, interrupts_blocked

_GUARD_ADVICE: Final = (
    "put the statements of the main module that start processes under "
    '`if __name__ == "__main__":`, because each process imports that module'
)


def start_child(
    context: Any, target: Callable[..., None], args: tuple[Any, ...], *, name: str, must: str
) -> BaseProcess:
    """Start a process that ignores Ctrl-C, which this process handles.

    Parameters
    ----------
    context
        Multiprocessing context of a start method.
    target, args, name
        Arguments of `Process`.
    must
        Start of the error message if the arguments cannot be pickled.

    Raises
    ------
    EnvironmentSpecError
        If the arguments cannot be pickled.
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

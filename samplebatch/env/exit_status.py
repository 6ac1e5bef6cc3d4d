"""Exit statuses of processes in words."""

from __future__ import annotations

import signal


def describe_exit(status: int | None) -> str:
    """Word how a process ended, by its exit status; None if it is still running.

    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'exited with status 3')
    """
    if status is None:
        return "closed its stream"
    return f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

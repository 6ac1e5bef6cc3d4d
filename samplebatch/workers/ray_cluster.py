"""The connection of a learner to a cluster of Ray, which may have tokens for authentication or not."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from samplebatch.errors import ArgumentError, require

_MODE = "RAY_AUTH_MODE"
_TOKEN = "token"
"""The environment variable by which the processes of Ray authenticate each other, and its value for doing so."""


def connect(address: str | None) -> Any:
    """Return the module `ray`, connected to the cluster that was asked for.

    On a machine that has a token, Ray turns authentication on for any cluster that it finds there. A cluster without
    tokens cannot call such a process, and cancels each of its actors before it starts. This one is connected to by
    its address, which leaves authentication off.

    Raises
    ------
    ArgumentError
        If this process is connected to another one.
    """
    ray = require("ray", "ray")
    if not ray.is_initialized():
        # Ray has no public name for the search that `ray.init` begins with.
        found = require("ray._private.services", "ray").canonicalize_bootstrap_address(address)
        ray.init(address=found if found is not None and _has_tokens(found) is False else address)
    connected = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", connected):
        raise ArgumentError(
            f"address must be of the cluster that this process is connected to, {connected!r}, got {address!r}"
        )
    return ray


def check_tokens(address: str) -> None:
    """Refuse to start actors on a cluster that does not authenticate, where this process does.

    Raises
    ------
    ArgumentError
        If so. Ray would cancel each actor, and say that all references to it were removed.
    """
    mode = os.environ.get(_MODE, "")
    if mode.lower() == _TOKEN and _has_tokens(address) is False:
        raise ArgumentError(
            f"{_MODE} must be 'disabled' from the start of the process for workers on the cluster of Ray at {address}, "
            f"which was started without tokens, got {mode!r}; Ray sets it, too, in a process that starts a cluster"
        )


def _has_tokens(address: str) -> bool | None:
    """Tell whether a cluster was started with tokens, by its node on this machine; None if that cannot be seen."""
    wanted = f"--gcs-address={address}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            if command[0].endswith(b"/raylet") and wanted in command:
                return f"{_MODE}={_TOKEN}".encode().lower() in (process / "environ").read_bytes().lower().split(b"\0")
    return None


def word_unstarted(account: str) -> str | None:
    """Return the reason in Ray's account of an actor that ended before it started; None for any other.

    >>> word_unstarted('''The actor died unexpectedly before finishing this task.
    ... The actor is dead because it was killed by `ray.kill`.
    ... The actor never ran - it was cancelled before it started running.''')
    'The actor is dead because it was killed by `ray.kill`.'
    >>> word_unstarted("The actor died unexpectedly before finishing this task.")
    """
    before, never_ran, _ = account.partition("\nThe actor never ran")
    return before.splitlines()[-1].strip() if never_ran else None

"""The backends of `RolloutWorkers` by their names."""

from __future__ import annotations

from typing import Literal, get_args

from samplebatch.arguments import choice
from samplebatch.errors import ArgumentError
from samplebatch.workers.backend import Backend, BackendOptions
from samplebatch.workers.inline_backend import InlineBackend
from samplebatch.workers.process_backend import ProcessBackend
from samplebatch.workers.ray_backend import RayBackend

BackendName = Literal["process", "inline", "ray"]

_BACKENDS: dict[BackendName, type[ProcessBackend | InlineBackend | RayBackend]] = {
    "process": ProcessBackend,
    "inline": InlineBackend,
    "ray": RayBackend,
}


def make_backend(name: BackendName, options: BackendOptions) -> Backend:
    """Make a backend by its name; nothing is started.

    Raises
    ------
    ArgumentError
        If there is none of that name, or there are options of Ray for another one.
    MissingExtraError
        If it is Ray's, and Ray is not installed.
    """
    choice("backend", name, get_args(BackendName))
    if options.ray_options is not None and name != "ray":
        raise ArgumentError(f"ray_options must be None unless backend is 'ray', got some with backend {name!r}")
    return _BACKENDS[name](options)

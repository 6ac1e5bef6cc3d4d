"""The buffers that collectors write to: rings of this process for each environment, or a buffer in another process."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ArgumentError


@runtime_checkable
class RemoteBuffer(Protocol):
    """A replay buffer in another process, which collectors and workers write to by whole fragments.

    It can be pickled, so that each worker writes to it from its own process.
    """

    def add_fragment(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Send the steps of a fragment; their ids tell which of them go on with an earlier one."""

    def flush(self) -> None:
        """Wait until all fragments are in the buffer."""

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty the buffer."""


def as_remote(buffer: Any) -> RemoteBuffer | None:
    """Return a buffer that takes fragments; None for none, and for one that takes steps into rings in this process."""
    return buffer if isinstance(buffer, RemoteBuffer) else None


def check_buffer(buffer: Any, num_envs: int, *, several: bool = False) -> None:
    """Refuse a buffer that a collector cannot write to; None, and one in another process, pass.

    Parameters
    ----------
    buffer
        The buffer that a collector or workers are given.
    num_envs
        How many environments write to it.
    several
        Whether it must be one of several agents.

    Raises
    ------
    ArgumentError
        If it is no buffer of the kind, or has fewer rings than environments write to it; a plain buffer has one.
    """
    if buffer is None or as_remote(buffer) is not None:
        return
    # Collectors without a buffer do not load these modules.
    from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
    from samplebatch.buffer.replay import ReplayBuffer

    kind = MultiAgentReplayBuffer if several else ReplayBuffer
    if not isinstance(buffer, kind):
        agents = "several agents" if several else "one agent"
        raise ArgumentError(
            f"buffer must be a {kind.__name__} or a ReplayClient for environments of {agents}, "
            f"got a {type(buffer).__name__}"
        )
    rings = getattr(buffer, "buffer_num", 1)
    if not several and rings < num_envs:
        raise ArgumentError(
            f"a buffer must have a ring for each of {num_envs} environments, got {rings}; "
            f"use a VectorReplayBuffer with buffer_num={num_envs}"
        )

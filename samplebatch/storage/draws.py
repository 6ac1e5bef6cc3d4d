"""Draws: the state in which a source draws its rows, for checkpoints that leave the rows themselves to the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.storage.buffer_state import generator_from_state, generator_state
from samplebatch.storage.mixed_sampler import MixedSampler


class Draws:
    """Generator of a replay buffer of constant rows, as a part of checkpoints: the rows are the user's."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        return dict(generator_state(self._buffer._rng))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw on from a state."""
        self._buffer._rng = generator_from_state(state)


class MixedDraws:
    """A mixed sampler with its sources, as a part of checkpoints.

    Parameters
    ----------
    sampler
        The sampler.

    Raises
    ------
    ArgumentError
        As `rows_part` does for a source.
    """

    def __init__(self, sampler: MixedSampler) -> None:
        self._sampler = sampler
        self._sources = {name: rows_part(source) for name, source in sampler.sources.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler, and of each source."""
        sources = {name: part.state_dict() for name, part in self._sources.items()}
        return {"sampler": self._sampler.state_dict(), "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw on from a state."""
        self._sampler.load_state_dict(state["sampler"])
        for name, part in self._sources.items():
            part.load_state_dict(state["sources"][name])


def rows_part(rows: Any) -> Any:
    """Return the part of checkpoints for rows that are there before training: their generators, and priorities if any.

    Parameters
    ----------
    rows
        A replay buffer, `Dataset` or `MixedSampler`; or another source with `state_dict` and `load_state_dict`.

    Raises
    ------
    ArgumentError
        If it is none of these.
    """
    if isinstance(rows, MixedSampler):
        return MixedDraws(rows)
    # The class is looked at, as a buffer goes through its columns for names that it has not.
    kind = type(rows)
    if isinstance(rows, ReplayBuffer) and not hasattr(kind, "update_weight"):
        return Draws(rows)
    if hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict"):
        return rows
    raise ArgumentError(
        f"buffer must have state_dict and load_state_dict to be a part of checkpoints, a {kind.__name__} has not"
    )

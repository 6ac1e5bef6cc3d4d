"""Flags: properties of a whole batch, beside its columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of a batch: the layout of its sequences, its age and its purpose; slices share them.

    Attributes
    ----------
    time_major
        Whether step columns have shape (T, B, ...) rather than (B * T, ...) or (rows, ...); None if unknown.
    zero_padded
        Whether every sequence occupies `max_seq_len` rows, zeros after its last step.
    max_seq_len
        Steps of the longest sequence, or the rows that each occupies when padded; None without sequences.
    num_grad_updates
        Gradient updates that the policy behind the batch had seen, averaged over steps; None if unknown.
    is_training
        Whether the batch is meant for training rather than for computing actions.
    """

    time_major: bool | None = None
    zero_padded: bool = False
    max_seq_len: int | None = None
    num_grad_updates: float | None = None
    is_training: bool = False


DEFAULT = Flags()

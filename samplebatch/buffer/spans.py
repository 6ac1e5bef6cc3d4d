"""How far an episode runs around a step: how many of its steps follow, and how many come before."""

from __future__ import annotations

import numpy as np

from samplebatch.buffer.ring import Flags, Ints, Rings

_FIRST_LOOK = 32
"""Steps that are looked at first; each further look takes twice as many, of those whose episode runs on."""


def steps_after(rings: Rings, done: Flags, slots: Ints, limit: int) -> Ints:
    """Count the steps that follow each in its episode, as far as the ring has them.

    Parameters
    ----------
    rings, done
        Of a table.
    slots
        Slots of rows, shape (k,).
    limit
        The most to count.

    Examples
    --------
    >>> rings, done = Rings([4]), np.array([False, True, False, False])
    >>> for end in (0, 1, 0, 0, 0):
    ...     added = rings.advance(None, np.array([end]), np.zeros(1))
    >>> steps_after(rings, np.array([False, True, False, False]), np.array([1, 2, 3, 0]), 9)
    array([0, 2, 1, 0])
    """
    return _run(rings, done, slots, limit, forward=True)


def steps_before(rings: Rings, done: Flags, slots: Ints, limit: int) -> Ints:
    """Count the steps that come before each in its episode, as far as the ring has them; see `steps_after`."""
    return _run(rings, done, slots, limit, forward=False)


def shifted(rings: Rings, slots: Ints, by: Ints) -> Ints:
    """Return the slots so many steps later in their rings, or earlier for negative numbers.

    Shapes are broadcast. The rings must have rows there.
    """
    ring = rings.ring_of(slots)
    base, size = rings.bases[ring], rings.sizes_of_all()[ring]
    moved: Ints = base + (slots - base + by) % size
    return moved


def _run(rings: Rings, done: Flags, slots: Ints, limit: int, *, forward: bool) -> Ints:
    ring = rings.ring_of(slots)
    base, size = rings.bases[ring], rings.sizes_of_all()[ring]
    place, last = slots - base, rings.last_index[ring] - base
    found = np.full(len(slots), limit, np.intp)
    left = np.arange(len(slots))
    seen, width = 0, _FIRST_LOOK
    while len(left) and seen < limit:
        steps = np.arange(seen, min(seen + width, limit))
        at = place[left, None] + (steps if forward else -1 - steps)
        at %= size[left, None]
        # Whether the step is its episode's last, and so is followed, or what comes after it preceded, by none.
        over = done[at + base[left, None]] | (at == last[left, None])
        ended = over.any(1)
        found[left[ended]] = seen + over[ended].argmax(1)
        left = left[~ended]
        seen, width = seen + len(steps), 2 * width
    return found

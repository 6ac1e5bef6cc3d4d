"""Copies of many arrays to their places, with both cores where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.column import threads


def copy_all(targets: Sequence[npt.NDArray[Any]], sources: Sequence[npt.NDArray[Any]], nbytes: int) -> None:
    """Copy each source to its target, which has its dtype and shape.

    Parameters
    ----------
    targets, sources
        As many of one as of the other.
    nbytes
        Bytes of all of them together, about.

    Examples
    --------
    >>> targets = [np.zeros(2), np.zeros(1, int)]
    >>> copy_all(targets, [np.ones(2), np.array([3])], nbytes=24)
    >>> targets
    [array([1., 1.]), array([3])]
    """
    if nbytes < threads.WORTHWHILE:
        for target, source in zip(targets, sources, strict=True):
            target[...] = source
        return
    jobs: list[threads.Job] = []
    for target, source in zip(targets, sources, strict=True):
        if target.ndim:
            parts = [(target[part], source[part]) for part in threads.pieces(len(target), target.nbytes)]
            jobs += [(to.nbytes, partial(np.copyto, to, own)) for to, own in parts]
        else:
            target[...] = source
    threads.share(jobs)

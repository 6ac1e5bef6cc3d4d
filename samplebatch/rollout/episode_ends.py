"""Which episodes ended, as far as the rows of a batch tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.sample_batch import SampleBatch


class EpisodeEnds(NamedTuple):
    """Episodes, shape (k,) in ascending order of their ids, and whether each of them ended."""

    ids: npt.NDArray[Any]
    finished: npt.NDArray[np.bool_]


def episode_ends(policies: Mapping[str, SampleBatch]) -> EpisodeEnds | None:
    """Tell which episodes ended.

    Those with a step that is marked by `eps_done`; without that column, those in whose last step every agent that acts
    is terminated or truncated.

    Parameters
    ----------
    policies
        Batches with the columns `eps_id` and `eps_done`; or `eps_id`, `t`, and `terminateds` and `truncateds` (or
        `dones`), in any order of rows, where a single one without `t` has its rows in order.

    Returns
    -------
    EpisodeEnds or None
        None if a batch lacks one of these columns.

    Examples
    --------
    >>> steps = SampleBatch(eps_id=[7, 7, 8], t=[0, 1, 0], dones=[False, True, False])
    >>> episode_ends({"walker": steps})
    EpisodeEnds(ids=array([7, 8]), finished=array([ True, False]))
    """
    batches = [steps for steps in policies.values() if steps.count]
    if not batches:
        return EpisodeEnds(np.empty(0, np.int64), np.empty(0, np.bool_))
    marked = all(names.EPS_ID in steps and names.EPS_DONE in steps for steps in batches)
    if not marked and not all(_tells(steps, ordered=len(batches) == 1) for steps in batches):
        return None
    eps_id = np.concatenate([np.asarray(steps[names.EPS_ID]) for steps in batches])
    if marked:
        last = np.concatenate([np.asarray(steps[names.EPS_DONE]) for steps in batches]).astype(np.bool_)
        ids, episode = np.unique(eps_id, return_inverse=True)
        finished = np.zeros(len(ids), np.bool_)
        finished[episode[last]] = True
        return EpisodeEnds(ids, finished)
    done = np.concatenate([np.asarray(steps[names.DONES]) for steps in batches]).astype(np.bool_)
    t = np.concatenate(
        [np.asarray(steps[names.T]) if names.T in steps else np.arange(len(eps_id)) for steps in batches]
    )
    order = np.lexsort((t, eps_id))
    eps_id, t, done = eps_id[order], t[order], done[order]
    starts = run_starts(eps_id)
    stops = np.append(starts[1:], len(eps_id))
    last = np.repeat(t[stops - 1], stops - starts)
    return EpisodeEnds(eps_id[starts], np.logical_and.reduceat(done | (t < last), starts))


def _tells(steps: SampleBatch, *, ordered: bool) -> bool:
    return (
        names.EPS_ID in steps
        and (ordered or names.T in steps)
        and (names.DONES in steps or (names.TERMINATEDS in steps and names.TRUNCATEDS in steps))
    )


def run_starts(*keys: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return where runs of equal keys begin, in keys that are not empty.

    >>> run_starts(np.array([7, 7, 7, 8]), np.array([0, 0, 1, 1]))
    array([0, 2, 3])
    """
    changed = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.concatenate(([0], np.flatnonzero(changed) + 1))

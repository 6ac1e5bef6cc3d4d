"""Reading and writing of Minari datasets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch import names
from samplebatch.batch.action_unit import ENVIRONMENT
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.convert import experience
from samplebatch.errors import ArgumentError, ColumnTypeError, require

if TYPE_CHECKING:
    import minari

_NAMES = names.PEERS["minari"]


def from_minari(dataset: minari.MinariDataset, *, episodes: Iterable[int] | None = None) -> SampleBatch:
    """Read episodes of a Minari dataset into a batch with one copy; see `episodes_from_minari`.

    Examples
    --------
    >>> import minari
    >>> dataset = minari.load_dataset("D4RL/door/human-v2")  # doctest: +SKIP
    >>> batch = from_minari(dataset, episodes=range(5))  # doctest: +SKIP
    """
    return experience.join_episodes(list(episodes_from_minari(dataset, episodes=episodes)))


def episodes_from_minari(
    dataset: minari.MinariDataset, *, episodes: Iterable[int] | None = None
) -> Iterator[SampleBatch]:
    """Iterate over the episodes of a Minari dataset, without copying Minari's arrays.

    Parameters
    ----------
    dataset
        The dataset.
    episodes
        Numbers of the episodes to read; None for all episodes.

    Yields
    ------
    SampleBatch
        Steps of an episode. `obs` and `new_obs` are views of the same array, `infos` omits the info of the reset, and
        `eps_id` is Minari's episode number.
    """
    for episode in dataset.iterate_episodes(episodes):
        columns = {name: getattr(episode, theirs) for name, theirs in _NAMES.items()}
        observations, infos = columns.pop(names.OBS), columns.pop(names.INFOS)
        terminated, truncated = columns.pop(names.TERMINATEDS), columns.pop(names.TRUNCATEDS)
        if infos:
            columns[names.INFOS] = experience.map_leaves(
                partial(_without_reset, len(columns[names.REWARDS])), infos, ""
            )
        yield experience.make_episode(
            int(episode.id),
            observations,
            columns,
            terminated=bool(terminated[-1:].any()),
            truncated=bool(truncated[-1:].any()),
            action_unit=ENVIRONMENT,
        )


def to_minari(
    source: experience.Source,
    dataset_id: str,
    *,
    env: Any = None,
    observation_space: Any = None,
    action_space: Any = None,
    jpeg_encoding: bool = False,
    **about: Any,
) -> minari.MinariDataset:
    """Write experience as a new Minari dataset.

    Actions are written in environment units. Minari stores observations, actions, rewards, flags and infos; other
    columns are omitted. An unfinished episode is written as truncated, as Minari's collector does.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments. `infos` must be arrays, or dicts whose keys are the same in all
        steps and whose values are numeric.
    dataset_id
        Name of the dataset, such as `"pole/expert-v0"`.
    env
        Environment, environment id or environment spec that defines the spaces.
    observation_space, action_space
        Spaces, if `env` is None.
    jpeg_encoding
        Whether to compress images with JPEG, which is lossy.
    **about
        Further arguments of `minari.create_dataset_from_buffers`: `algorithm_name`, `author`, `description`, ...

    Raises
    ------
    ArgumentError
        If neither an environment nor both spaces are passed.
    ColumnNotFoundError
        If a column is missing.
    ColumnTypeError
        If a column has rows of varying shape, or infos are not numeric.
    SequenceError, EmptyBufferError
        If steps of an episode are missing, or there are no steps.
    MissingExtraError
        If Minari is not installed.
    """
    minari = require("minari", "minari")
    if env is None and (observation_space is None or action_space is None):
        raise ArgumentError(
            "env, or observation_space and action_space, must be passed, because Minari stores the spaces"
        )
    steps = experience.as_steps(source)
    experience.require_columns(steps.batch, names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS)
    episode_buffer = require("minari.data_collector", "minari").EpisodeBuffer
    return minari.create_dataset_from_buffers(
        dataset_id,
        [episode_buffer(**_episode_values(episode)) for episode in steps.episodes()],
        env=env,
        observation_space=observation_space,
        action_space=action_space,
        jpeg_encoding=jpeg_encoding,
        **about,
    )


def _without_reset(n: int, path: str, leaf: Any) -> Any:
    return leaf[len(leaf) - n :]


def _episode_values(episode: SampleBatch) -> dict[str, Any]:
    terminated, truncated = experience.flags_of(episode)
    truncated = truncated | ((np.arange(episode.count) == episode.count - 1) & ~terminated)
    values = {
        names.OBS: experience.observations_of(episode),
        names.ACTIONS: experience.arrays_of(episode, names.ACTIONS),
        names.REWARDS: experience.arrays_of(episode, names.REWARDS),
        names.TERMINATEDS: terminated,
        names.TRUNCATEDS: truncated,
        names.INFOS: _infos_of(episode),
    }
    return {_NAMES[name]: value for name, value in values.items()}


def _infos_of(episode: SampleBatch) -> Any:
    """Return infos as arrays of shape (n + 1, ...), with a row of zeros for the reset; None if there are no infos."""
    if names.INFOS not in episode:
        return None
    infos: Any = episode[names.INFOS]
    if not isinstance(infos, Mapping):
        rows = [row or {} for row in infos.tolist()]
        if not any(rows):
            return None
        for row in rows:
            if differing := row.keys() ^ rows[0].keys():
                key = min(differing, key=str)
                raise ColumnTypeError(
                    f"column {names.INFOS!r} must have the same keys in all steps, got {key!r} only in some; drop it"
                )
        infos = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
    return experience.map_leaves(_with_reset, infos, names.INFOS)


def _with_reset(path: str, leaf: Any) -> Any:
    array = np.asarray(leaf)
    if array.dtype.kind not in "biufc":
        raise ColumnTypeError(f"column {path!r} must be numeric to be stored by Minari, got {array.dtype}; drop it")
    return np.concatenate([np.zeros_like(array[:1]), array])

"""Conversion of RLlib's episodes and offline data (JSON, Parquet and msgpack), and of Ray Data datasets of steps."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import errors, names
from samplebatch.arguments import describe_value
from samplebatch.batch.concat import concat_samples
from samplebatch.batch.inert_pickle import looks_packed, unpack
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.memory import MemoryBound
from samplebatch.column.types import named_dtype
from samplebatch.column.unpickling import unpickle
from samplebatch.convert import experience
from samplebatch.convert.experience import Source, as_flat, fragments_of
from samplebatch.storage.files import replacing

if TYPE_CHECKING:
    from ray.data import Dataset
    from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode


AGENT_ID = "agent_id"
MODULE_ID = "module_id"
_ENV_T = "env_t"
_TRANSITION = (names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS)

_OWN = frozenset(
    (
        names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS, names.DONES,
        names.INFOS, names.EPS_ID, names.T, names.ENV_ID, names.AGENT_INDEX, names.UNROLL_ID, names.EPS_DONE,
        names.WEIGHTS_VERSION, AGENT_ID, MODULE_ID,
    )
)  # fmt: skip
"""Columns that are not extra model outputs of an episode."""


class EpisodeParts(NamedTuple):
    """Parts of a single-agent episode without the lookback: lists with one item per step, or arrays."""

    id: str
    observations: Any
    infos: Any
    actions: Any
    rewards: Any
    extras: Mapping[str, Any]
    terminated: bool
    truncated: bool
    t_started: int

    def to_batch(self) -> SampleBatch:
        """Return the steps as a batch; arrays are shared, and lists are stacked."""
        columns = {
            names.ACTIONS: _stack(self.actions, names.ACTIONS),
            names.REWARDS: _stack(self.rewards, names.REWARDS),
            **{name: _stack(values, name) for name, values in self.extras.items()},
        }
        infos = list(self.infos)[1:]
        if any(infos):
            columns[names.INFOS] = [info or {} for info in infos]
        observations = _stack(self.observations, names.OBS)
        batch = experience.make_episode(0, observations, columns, terminated=self.terminated, truncated=self.truncated)
        batch[names.EPS_ID] = np.full(batch.count, self.id)
        batch[names.T] = np.arange(self.t_started, self.t_started + batch.count)
        return batch


def from_rllib_episodes(
    episodes: Iterable[SingleAgentEpisode] | Iterable[MultiAgentEpisode],
) -> SampleBatch | MultiAgentBatch:
    """Convert RLlib episodes to a batch of steps.

    The id of an episode becomes `eps_id`. The lookback before the first step of an episode is omitted. Extra model
    outputs become columns with the same names.

    Parameters
    ----------
    episodes
        Episodes of the same class, with data as lists or as NumPy arrays. A single episode of NumPy arrays is not
        copied.

    Returns
    -------
    SampleBatch or MultiAgentBatch
        For multi-agent episodes, one batch per module; the columns `agent_id` and `t` (environment time) identify the
        rows. An action is omitted if its agent has not observed the outcome yet.

    Raises
    ------
    ColumnTypeError
        If there is no episode, episodes have different classes, or the values of a column have different shapes.
    ColumnMismatchError
        If episodes have different columns, or steps have different structures.

    Examples
    --------
    >>> from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    >>> episode = SingleAgentEpisode(
    ...     observations=[0.0, 1.0, 2.0],
    ...     actions=[1, 0],
    ...     rewards=[0.5, 1.0],
    ...     terminated=True,
    ...     len_lookback_buffer=0,
    ... )
    >>> batch = from_rllib_episodes([episode])
    >>> batch["new_obs"].tolist(), batch["terminateds"].tolist()
    ([1.0, 2.0], [False, True])
    """
    listed = list(episodes)
    if listed and all(hasattr(episode, "agent_episodes") for episode in listed):
        return _from_several_agents(listed)
    if not listed or not all(hasattr(episode, "extra_model_outputs") for episode in listed):
        kinds = ", ".join(sorted({type(episode).__name__ for episode in listed})) or "none"
        raise errors.ColumnTypeError(
            f"episodes must contain at least one RLlib episode, and only episodes of the same class, got {kinds}"
        )
    return experience.join_episodes([parts_of(episode).to_batch() for episode in listed])


def parts_of(episode: Any) -> EpisodeParts:
    """Split a single-agent episode into its parts."""

    def cut(buffer: Any) -> Any:
        return trim(buffer.data, buffer.lookback)

    return EpisodeParts(
        str(episode.id_),
        cut(episode.observations),
        cut(episode.infos),
        cut(episode.actions),
        cut(episode.rewards),
        {str(name): cut(buffer) for name, buffer in episode.extra_model_outputs.items()},
        bool(episode.is_terminated),
        bool(episode.is_truncated),
        int(episode.t_started),
    )


def trim(data: Any, lookback: int) -> Any:
    """Remove the lookback: the first items of a list of steps, or the first rows of each array of a tree."""
    if isinstance(data, list):
        return data[lookback:]
    return experience.map_leaves(lambda _, leaf: leaf[lookback:], data, "")


def _stack(steps: Any, path: str) -> Any:
    return experience.stack_steps(steps, path) if isinstance(steps, list) else steps


def _from_several_agents(episodes: list[Any]) -> MultiAgentBatch:
    by_module: dict[str, list[SampleBatch]] = {}
    for episode in episodes:
        for index, (agent, agent_episode) in enumerate(
            sorted(episode.agent_episodes.items(), key=lambda item: str(item[0]))
        ):
            batch = parts_of(agent_episode).to_batch()
            if not batch.count:
                continue
            batch[names.EPS_ID] = np.full(batch.count, str(episode.id_))
            batch[AGENT_ID] = np.full(batch.count, str(agent))
            batch[names.AGENT_INDEX] = np.full(batch.count, index)
            batch[names.T] = _env_times(episode, agent)[: batch.count]
            module = agent_episode.module_id if agent_episode.module_id is not None else episode.module_for(agent)
            by_module.setdefault(str(module), []).append(batch)
    policies = {module: experience.join_episodes(batches) for module, batches in by_module.items()}
    return MultiAgentBatch(policies, sum(map(len, episodes)))


def _env_times(episode: Any, agent: Any) -> npt.NDArray[np.int64]:
    """Return the environment times of an agent's observations, without the lookback."""
    steps = episode.env_t_to_agent_t[agent]
    data = list(steps.data)[steps.lookback :]
    observed = [i for i, t in enumerate(data) if t != episode.SKIP_ENV_TS_TAG]
    return np.array(observed, np.int64) + np.int64(episode.env_t_started)


# Writing


def to_rllib_episodes(
    source: experience.Source, *, observation_space: Any = None, action_space: Any = None
) -> list[SingleAgentEpisode] | list[MultiAgentEpisode]:
    """Convert steps to RLlib episodes in NumPy form.

    Columns unknown to RLlib (`action_logp`, `vf_preds`, ...) become extra model outputs. `state_in` of each step
    becomes `state_out` of the previous step, because learners of recurrent modules read `state_out`. Observations are
    not copied if `obs` and `new_obs` are views of the same array, as in the result of `from_rllib_episodes`.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments. A MultiAgentBatch is converted to multi-agent episodes and must
        have the columns `eps_id` and `t`. The agents are identified by the column `agent_id` if it exists, otherwise by
        `agent_index`.
    observation_space, action_space
        Spaces to store in the episodes; for multi-agent episodes, dicts of spaces by agent id.

    Raises
    ------
    ColumnNotFoundError, ColumnTypeError
        If a column is missing, or has rows of varying shape.
    SequenceError, EmptyBufferError
        If steps of an agent in an episode are missing, or there are no steps.
    MissingExtraError
        If RLlib is not installed.
    """
    if isinstance(source, MultiAgentBatch):
        return _to_several_agents(source, observation_space, action_space)
    module = errors.require("ray.rllib.env.single_agent_episode", "rllib")
    lookback = errors.require("ray.rllib.env.utils.infinite_lookback_buffer", "rllib").InfiniteLookbackBuffer
    converted = []
    for episode in _episodes(source):
        terminated, truncated = (bool(flags[-1]) for flags in experience.flags_of(episode))
        parts = {
            "observations": experience.observations_of(episode),
            "actions": experience.arrays_of(episode, names.ACTIONS),
            "rewards": experience.arrays_of(episode, names.REWARDS),
        }
        converted.append(
            module.SingleAgentEpisode(
                str(episode[names.EPS_ID][0]) if names.EPS_ID in episode else None,
                **{name: lookback(values) for name, values in parts.items()},
                infos=lookback([{}, *_infos(episode)]),
                extra_model_outputs=_model_outputs(episode, lookback),
                terminated=terminated,
                truncated=truncated,
                t_started=int(episode[names.T][0]) if names.T in episode else 0,
                len_lookback_buffer=0,
                observation_space=observation_space,
                action_space=action_space,
            )
        )
    return converted


def _model_outputs(episode: SampleBatch, lookback: Any) -> dict[str, Any]:
    """Return the extra model outputs of an episode; `state_in` of a step becomes `state_out` of the previous step.

    The initial state becomes the lookback. The state after the last step is not recorded; the state before the last
    step replaces it, because learners do not read the last `state_out`.
    """
    extras = [name for name in episode if name not in _OWN and name != names.STATE_IN]
    outputs = {name: lookback(experience.arrays_of(episode, name)) for name in extras}
    if names.STATE_IN in episode and names.STATE_OUT not in episode:
        rows = np.append(np.arange(episode.count), episode.count - 1)
        outputs[names.STATE_OUT] = lookback(_take(experience.arrays_of(episode, names.STATE_IN), rows), lookback=1)
    return outputs


def _take(values: Any, rows: Any) -> Any:
    if isinstance(values, dict):
        return {name: _take(value, rows) for name, value in values.items()}
    return values[rows]


def _episodes(source: experience.Source) -> Iterator[SampleBatch]:
    steps = experience.as_steps(source)
    experience.require_columns(steps.batch, *_TRANSITION)
    return steps.episodes()


def _infos(episode: SampleBatch) -> list[Any]:
    if names.INFOS not in episode:
        return [{} for _ in range(episode.count)]
    # Rewards are selected too, because infos alone define no rows.
    return [row[names.INFOS] or {} for row in episode.select(names.INFOS, names.REWARDS).rows()]


class _AgentSteps(NamedTuple):
    agent: Any
    module: str
    rows: list[dict[str, Any]]
    times: list[int]
    terminated: bool
    truncated: bool


def _to_several_agents(source: MultiAgentBatch, observation_space: Any, action_space: Any) -> list[Any]:
    module = errors.require("ray.rllib.env.multi_agent_episode", "rllib")
    by_episode: dict[Any, list[_AgentSteps]] = {}
    for policy, batch in source.policy_batches.items():
        experience.require_columns(batch, names.EPS_ID, names.T, *_TRANSITION)
        for part in _trajectories(batch):
            agent_steps = _agent_steps(policy, part)
            by_episode.setdefault(part[names.EPS_ID][0], []).append(agent_steps)
    return [
        _episode_of_agents(module.MultiAgentEpisode, str(episode), agents, observation_space, action_space)
        for episode, agents in by_episode.items()
    ]


def _trajectories(batch: SampleBatch) -> Iterator[SampleBatch]:
    """Yield the steps of each agent in each episode; `t` is renamed, because its values can have gaps."""
    if names.AGENT_INDEX not in batch and AGENT_ID in batch:
        batch = batch.copy(shallow=True)
        batch[names.AGENT_INDEX] = np.unique(np.asarray(batch[AGENT_ID]), return_inverse=True)[1].reshape(-1)
    order = np.argsort(np.asarray(batch[names.T]), kind="stable")
    return experience.as_steps(batch.take(order).rename({names.T: _ENV_T})).episodes()


def _agent_steps(policy: str, part: SampleBatch) -> _AgentSteps:
    terminated, truncated = (bool(flags[-1]) for flags in experience.flags_of(part))
    rows = list(part.rows())
    first = rows[0]
    agent = str(first[AGENT_ID]) if AGENT_ID in first else int(first.get(names.AGENT_INDEX, 0))
    return _AgentSteps(agent, policy, rows, np.asarray(part[_ENV_T]).tolist(), terminated, truncated)


def _episode_of_agents(
    cls: Any, name: str, agents: list[_AgentSteps], observation_space: Any, action_space: Any
) -> MultiAgentEpisode:
    start = min(steps.times[0] for steps in agents)
    length = max(steps.times[-1] for steps in agents) - start + 1
    columns: dict[str, list[dict[Any, Any]]] = {
        key: [{} for _ in range(length + 1)] for key in ("observations", "infos", "actions", "rewards", "extras")
    }
    for steps in agents:
        indices = [t - start for t in steps.times]
        # A running agent's last observation is stored at the end; RLlib would treat an earlier one as a termination.
        after = [*indices[1:], indices[-1] + 1 if steps.terminated or steps.truncated else length]
        for row, index, following in zip(steps.rows, indices, after, strict=True):
            columns["observations"][index][steps.agent] = row[names.OBS]
            columns["observations"][following][steps.agent] = row[names.NEXT_OBS]
            columns["infos"][following][steps.agent] = row.get(names.INFOS) or {}
            columns["actions"][index][steps.agent] = row[names.ACTIONS]
            columns["rewards"][index][steps.agent] = row[names.REWARDS]
            columns["extras"][index][steps.agent] = {key: row[key] for key in row if key not in _OWN and key != _ENV_T}
    terminateds: dict[Any, bool] = {steps.agent: steps.terminated for steps in agents}
    truncateds: dict[Any, bool] = {steps.agent: steps.truncated for steps in agents}
    terminateds["__all__"] = all(terminateds.values())
    truncateds["__all__"] = not terminateds["__all__"] and all(steps.terminated or steps.truncated for steps in agents)
    episode: MultiAgentEpisode = cls(
        name,
        observations=columns["observations"],
        infos=columns["infos"],
        actions=columns["actions"][:-1],
        rewards=columns["rewards"][:-1],
        extra_model_outputs=columns["extras"][:-1],
        terminateds=terminateds,
        truncateds=truncateds,
        env_t_started=start,
        len_lookback_buffer=0,
        agent_module_ids={steps.agent: steps.module for steps in agents},
        observation_space=observation_space,
        action_space=action_space,
    )
    return episode.to_numpy()


_EPISODE = "item"
"""Column in which Ray Data stores items that are not dicts."""

_COMPRESSED = (names.OBS, names.NEXT_OBS)
_GROWTH = 32
"""Maximum bytes of memory per character of JSON: two characters may encode a list item or an empty list."""


def pack(value: Any) -> str:
    """Pack a value as RLlib's `pack` does: as a pickle that is compressed with LZ4 and encoded in base64.

    >>> pack([1, 2])[:5]
    'BCJNG'
    """
    import lz4.frame

    return base64.b64encode(lz4.frame.compress(pickle.dumps(value, 5))).decode("ascii")


# JSON


def read_rllib_json(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, max_nbytes: int | None = None
) -> SampleBatch | MultiAgentBatch:
    """Read the batches in RLlib's JSON files and concatenate them.

    Packed columns are pickles. Pickles of arrays and plain values are decoded as data, without unpickling.

    Parameters
    ----------
    path
        A file, or a folder of files that end in `.json`.
    allow_pickle
        Whether to unpickle packed columns of objects that are neither arrays nor plain values. Unpickling can execute
        arbitrary code; allow it only for files from a trusted source.
    max_nbytes
        Maximum number of bytes to allocate per file; None for the larger of 256 MiB and 1024 times the file's size.

    Raises
    ------
    FormatError
        If a line is not a batch in RLlib's format.
    UntrustedPickleError
        If a column contains packed objects and `allow_pickle` is false.
    CapacityError, ColumnMismatchError
        If more memory than `max_nbytes` would be allocated, or batches have different columns.
    OSError
        If a file cannot be read.
    """
    batches: list[SampleBatch | MultiAgentBatch] = []
    for file in experience.files_in(path, ".json"):
        bound = MemoryBound(repr(str(file)), file.stat().st_size, max_nbytes)
        with open(file, encoding="utf-8") as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        batches.append(_read_line(line, f"line {number} of {str(file)!r}", bound, allow_pickle))
            except UnicodeDecodeError as error:
                raise errors.FormatError(f"{str(file)!r} must be UTF-8 text: {error}") from error
    if not batches:
        raise errors.FormatError(f"{os.fspath(path)!r} must contain RLlib batches, got none")
    return concat_samples(batches)


def _read_line(line: str, where: str, bound: MemoryBound, allow_pickle: bool) -> SampleBatch | MultiAgentBatch:
    bound.take(_GROWTH * len(line), where)
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise errors.FormatError(f"{where} must be valid JSON: {error}") from error
    kind = document.pop("type", None) if isinstance(document, dict) else None

    def batch_of(columns: Any) -> SampleBatch:
        if not isinstance(columns, dict):
            raise errors.FormatError(f"{where} must contain columns by name, got a {type(columns).__name__}")
        return SampleBatch({name: unpacked(value, name) for name, value in columns.items()})

    def unpacked(value: Any, name: str) -> Any:
        subject = f"column {name!r} in {where}"
        return unpack(value, subject, bound, allow_pickle=allow_pickle) if isinstance(value, str) else value

    if kind == "SampleBatch":
        return batch_of(document)
    policies = document.get("policy_batches") if isinstance(document, dict) else None
    if kind != "MultiAgentBatch":
        raise errors.FormatError(
            f"{where} must be an RLlib SampleBatch or MultiAgentBatch, got type {describe_value(kind)}"
        )
    if not isinstance(policies, dict):
        raise errors.FormatError(f"{where} must have 'policy_batches' by policy id, got {describe_value(policies)}")
    count = document.get("count")
    if type(count) is not int or count < 0:
        raise errors.FormatError(f"{where} must have a count of environment steps, got {describe_value(count)}")
    return MultiAgentBatch({policy: batch_of(columns) for policy, columns in policies.items()}, count)


def write_rllib_json(
    source: experience.Source, path: str | os.PathLike[str], *, compress_columns: Iterable[str] = _COMPRESSED
) -> None:
    """Write experience as RLlib's offline JSON data, one line per fragment, atomically.

    Parameters
    ----------
    source
        A batch of one or several policies, a buffer, or an iterable of fragments.
    path
        Path of the file; RLlib reads files whose names end in `.json`.
    compress_columns
        Columns to pack as RLlib does; packing preserves dtypes. Nested columns are always packed. Other columns become
        lists of numbers.

    Raises
    ------
    ColumnTypeError
        If a column has rows of varying shape, or contains objects that JSON cannot represent.
    EmptyBufferError, SequenceError
        If there are no steps, or the steps are time-major.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/steps.json"
    >>> write_rllib_json(SampleBatch(obs=[[0.5], [1.0]], rewards=[1.0, 2.0]), path)
    >>> read_rllib_json(path)["obs"].tolist()
    [[0.5], [1.0]]
    """
    packed = frozenset(compress_columns)
    with replacing(path) as file:
        for fragment in experience.fragments_of(source):
            file.write(json.dumps(_line(fragment, packed)).encode() + b"\n")


def _line(fragment: SampleBatch | MultiAgentBatch, packed: frozenset[str]) -> dict[str, Any]:
    if isinstance(fragment, SampleBatch):
        return {"type": "SampleBatch", **_columns(fragment, packed)}
    batches = {str(policy): experience.as_flat(batch) for policy, batch in fragment.policy_batches.items()}
    policies = {policy: _columns(batch, packed) for policy, batch in batches.items()}
    return {"type": "MultiAgentBatch", "count": fragment.count, "policy_batches": policies}


def _columns(batch: SampleBatch, packed: frozenset[str]) -> dict[str, Any]:
    columns = {}
    for name in batch:
        values = experience.arrays_of(batch, name)
        # RLlib can read nested columns only if they are packed.
        columns[name] = pack(values) if name in packed or not isinstance(values, np.ndarray) else _as_json(name, values)
    return columns


def _as_json(path: str, values: npt.NDArray[Any]) -> Any:
    rows = values.tolist()
    if values.dtype.kind in "biuf":
        return rows
    try:
        json.dumps(rows)
    except (TypeError, ValueError) as error:
        raise errors.ColumnTypeError(
            f"column {path!r} must contain values that JSON can represent, got {values.dtype}"
        ) from error
    return rows


# Parquet


def read_rllib_parquet(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, max_nbytes: int | None = None
) -> SampleBatch:
    """Read the steps or episodes that RLlib's new API stack has written to Parquet files.

    Packed values are pickles. Pickles of arrays and plain values are decoded as data, without unpickling.

    Parameters
    ----------
    path
        A file, or a folder that is searched recursively for files that end in `.parquet`.
    allow_pickle
        Whether to unpickle objects that are neither arrays nor plain values. Unpickling can execute arbitrary code;
        allow it only for files from a trusted source.
    max_nbytes
        Maximum number of bytes to allocate per file; None for the larger of 256 MiB and 1024 times the file's size.

    Raises
    ------
    FormatError
        If a file is damaged, or a value is not in RLlib's format.
    UntrustedPickleError
        If a value is a packed object, and `allow_pickle` is false.
    CapacityError
        If more memory than `max_nbytes` would be allocated.
    ColumnMismatchError
        If files have different columns, or packed values of a column have different structures.
    MissingExtraError, OSError
        If a file contains episodes and msgpack is not installed, or a file cannot be read.
    """
    batches: list[SampleBatch] = []
    for table, bound in experience.read_tables(path, max_nbytes):
        if table.column_names == [_EPISODE]:
            batches += _read_episodes(table.column(0), bound, allow_pickle)
        else:
            batches.append(_read_steps(table, bound, allow_pickle))
    return experience.join_episodes([batch for batch in batches if batch.count] or [SampleBatch()])


def _read_steps(table: pa.Table, bound: MemoryBound, allow_pickle: bool) -> SampleBatch:
    columns: dict[str, Any] = {}
    packed: dict[str, list[Any]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count == len(column):
            continue
        # Columns of ids are also strings, but are not packed.
        text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        if text and name not in (names.EPS_ID, AGENT_ID, MODULE_ID) and looks_packed(column[0].as_py()):
            subject = f"column {name!r}"
            packed[name] = [unpack(row, subject, bound, allow_pickle=allow_pickle) for row in column.to_pylist()]
        else:
            columns[name] = column
    batch = SampleBatch.from_arrow(without_ray_types(table.select(list(columns))), allow_pickle=allow_pickle)
    ordered = {
        name: experience.gather_leaves(packed[name], name) if name in packed else batch[name]
        for name in table.column_names
        if name in packed or name in columns
    }
    return SampleBatch(ordered)


def _read_episodes(column: pa.ChunkedArray, bound: MemoryBound, allow_pickle: bool) -> list[SampleBatch]:
    msgpack = errors.require("msgpack", "rllib")
    batches = []
    for number, data in enumerate(column.to_pylist()):
        subject = f"episode {number}"
        if not isinstance(data, bytes):
            raise errors.FormatError(f"{subject} must be bytes of msgpack, got a {type(data).__name__}")
        bound.take(16 * len(data), subject)

        def decode(encoded: dict[Any, Any], subject: str = subject) -> Any:
            return _decode(encoded, subject, allow_pickle)

        try:
            state = msgpack.unpackb(data, object_hook=decode, strict_map_key=False)
            batches.append(_parts_in(state).to_batch())
        except errors.SampleBatchError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise errors.FormatError(f"{subject} must be an RLlib episode in msgpack: {error}") from error
    return batches


def _parts_in(state: dict[str, Any]) -> EpisodeParts:
    def cut(name: str, of: Any = state) -> Any:
        return trim(of[name]["data"], int(of[name]["lookback"]))

    extras = state["extra_model_outputs"] or {}
    return EpisodeParts(
        str(state["id_"]),
        cut("observations"),
        cut("infos"),
        cut("actions"),
        cut("rewards"),
        {str(name): cut(name, extras) for name in extras},
        bool(state["is_terminated"]),
        bool(state["is_truncated"]),
        int(state["t_started"]),
    )


def _decode(encoded: dict[Any, Any], subject: str, allow_pickle: bool) -> Any:
    """Decode an array or a number that `msgpack_numpy` has encoded as a dict."""
    if encoded.get(b"complex") is True:
        return complex(encoded[b"data"])
    if b"nd" not in encoded:
        return encoded
    if encoded.get(b"kind") == b"O":
        return unpickle([encoded[b"data"]], subject, allow_pickle=allow_pickle)[0]
    if encoded.get(b"kind") == b"V" or not isinstance(encoded[b"type"], str):
        actual = (
            "structured dtypes" if encoded.get(b"kind") == b"V" else f"a {type(encoded[b'type']).__name__} as dtype"
        )
        raise errors.FormatError(f"{subject} must contain numeric arrays, got {actual}")
    values = np.frombuffer(encoded[b"data"], named_dtype(encoded[b"type"]))
    return values.reshape(encoded[b"shape"]) if encoded[b"nd"] is True else values[0]


def write_rllib_parquet(
    source: experience.Source, path: str | os.PathLike[str], *, compress_columns: Iterable[str] = _COMPRESSED
) -> None:
    """Write steps as rows of a Parquet file for RLlib's offline stack (`input_read_method="read_parquet"`).

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.
    path
        The file.
    compress_columns
        Columns to pack row by row, as RLlib does; required for nested columns and for rows of two or more dimensions.

    Raises
    ------
    ColumnNotFoundError
        If `rewards` is missing, or no column delimits episodes.
    ColumnTypeError
        If a column that is not packed is nested, or has rows of varying shape.
    EmptyBufferError, SequenceError
        If there are no steps, or steps of an episode are missing.
    OSError
        If the file cannot be written.
    """
    from pyarrow import parquet

    steps = experience.as_steps(source)
    experience.require_columns(steps.batch, names.REWARDS)
    packed = frozenset(compress_columns)
    terminated, truncated = experience.flags_of(steps.batch)
    ids = np.asarray(steps.batch[names.EPS_ID]) if names.EPS_ID in steps.batch else steps.numbers()
    flags = {names.TERMINATEDS: pa.array(terminated), names.TRUNCATEDS: pa.array(truncated)}
    columns: dict[str, Any] = {names.EPS_ID: pa.array([str(number) for number in ids.tolist()]), **flags}
    for name in steps.batch:
        if name not in columns and name != names.DONES:
            columns[name] = _packed_rows(steps.batch, name) if name in packed else _plain_rows(steps.batch, name)
    with replacing(path) as file:
        parquet.write_table(pa.table(columns), file)


def _packed_rows(batch: SampleBatch, name: str) -> pa.Array:
    return pa.array([pack(row[name]) for row in batch.select(*dict.fromkeys((name, names.REWARDS))).rows()])


def _plain_rows(batch: SampleBatch, name: str) -> pa.Array:
    values = experience.arrays_of(batch, name)
    if not isinstance(values, np.ndarray):
        raise errors.ColumnTypeError(f"column {name!r} must be packed, got nested columns; add it to compress_columns")
    return pa.array(list(values) if values.ndim == 2 else values.tolist() if values.ndim > 2 else values)


def write_rllib_episodes(source: experience.Source, path: str | os.PathLike[str]) -> None:
    """Write episodes as msgpack in a Parquet file for RLlib's offline stack (`input_read_episodes=True`).

    Raises
    ------
    ColumnNotFoundError, ColumnTypeError, EmptyBufferError, SequenceError
        As in `to_rllib_episodes`.
    MissingExtraError
        If RLlib or msgpack is not installed.
    OSError
        If the file cannot be written.
    """
    from pyarrow import parquet

    msgpack = errors.require("msgpack", "rllib")
    episodes: list[Any] = to_rllib_episodes(experience.as_steps(source).batch)
    rows = [msgpack.packb(episode.get_state(), default=_encode) for episode in episodes]
    with replacing(path) as file:
        parquet.write_table(pa.table({_EPISODE: pa.array(rows, pa.large_binary())}), file)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return value.tolist()
    if isinstance(value, np.ndarray):
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": value.tobytes()}
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(f"an episode must contain values that msgpack can represent, got a {type(value).__name__}")


# Ray Data


def to_ray_dataset(source: Source) -> Dataset:
    """Create a Ray Data dataset with one block per fragment; the Arrow types of columns are preserved.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.

    Raises
    ------
    ColumnTypeError, SequenceError, EmptyBufferError
        If the source does not consist of steps of one policy.
    MissingExtraError
        If Ray is not installed.
    """
    data = errors.require("ray.data", "ray")
    dataset: Dataset = data.from_arrow([as_flat(part).to_arrow() for part in fragments_of(source)])
    return dataset


def from_ray_dataset(dataset: Dataset, *, allow_pickle: bool = False, max_nbytes: int | None = None) -> SampleBatch:
    """Read a Ray Data dataset into one batch; a single block is not copied.

    Ray's tensor types become arrays. Dotted names become nested columns if the dataset still has the schema that
    `to_ray_dataset` wrote.

    Parameters
    ----------
    dataset
        The dataset, which must fit into memory; use `dataset.limit` otherwise.
    allow_pickle
        Whether to unpickle columns of Python objects that Arrow cannot represent. Unpickling can execute arbitrary
        code; allow it only for data from a trusted source.
    max_nbytes
        Maximum number of bytes to allocate for Python objects; None for the larger of 256 MiB and 1024 times the
        table's size.

    Raises
    ------
    ColumnTypeError
        If a column has nulls or an unsupported type.
    ColumnMismatchError
        If blocks have different columns.
    UntrustedPickleError, CapacityError
        As in `SampleBatch.from_arrow`.
    EmptyBufferError, MissingExtraError
        If there are no steps, or Ray is not installed.
    """
    ray = errors.require("ray", "ray")
    blocks: list[Any] = [block for block in ray.get(dataset.to_arrow_refs()) if block.num_rows]
    if not blocks:
        raise errors.EmptyBufferError("a Ray dataset must contain steps, got none")
    try:
        table = pa.concat_tables(map(without_ray_types, blocks), promote_options="permissive")
    except pa.ArrowException as error:
        raise errors.ColumnMismatchError(f"blocks of a Ray dataset must have the same columns: {error}") from error
    return SampleBatch.from_arrow(table, allow_pickle=allow_pickle, max_nbytes=max_nbytes)


_FIXED = frozenset(("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2"))
_VARIABLE = "ray.data.arrow_variable_shaped_tensor"

_MAX_DIMENSIONS = 63
"""Maximum dimensions of a row; NumPy adds one for the rows."""


def without_ray_types(table: pa.Table) -> pa.Table:
    """Convert Ray Data's tensor types to fixed-size or variable-size lists; other columns are unchanged.

    Raises FormatError if a tensor is not in Ray's layout, does not have its declared shape, or has rows of varying
    shape.
    """
    fields, columns = [], []
    for field, column in zip(table.schema, table.columns, strict=True):
        name, metadata = _extension(field)
        if name == _VARIABLE:
            column = pa.chunked_array([_lists(chunk, field.name) for chunk in column.chunks])
            field = pa.field(field.name, column.type, nullable=False)
        elif name in _FIXED:
            shape = _shape(field, metadata)
            column = pa.chunked_array([_tensor(chunk, shape, field.name) for chunk in column.chunks])
            field = pa.field(field.name, column.type, nullable=False)
        fields.append(field)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, table.schema.metadata))


def _extension(field: pa.Field) -> tuple[str, bytes]:
    """Return the name and metadata of a field's extension type, which is unregistered if Ray is not imported."""
    if isinstance(field.type, pa.BaseExtensionType):
        extension = field.type.extension_name
        return extension, field.type.__arrow_ext_serialize__() if extension in _FIXED else b""
    metadata = field.metadata or {}
    name = metadata.get(b"ARROW:extension:name", b"").decode("utf-8", "replace")
    return name, metadata.get(b"ARROW:extension:metadata", b"")


def _shape(field: pa.Field, metadata: bytes) -> tuple[int, ...]:
    shape: Any = getattr(field.type, "shape", None)
    if shape is None:
        try:
            shape = json.loads(metadata)
        except (ValueError, RecursionError) as error:
            raise errors.FormatError(
                f"column {field.name!r} must declare the shape of its tensors in its metadata: {error}"
            ) from error
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise errors.FormatError(
            f"column {field.name!r} must declare the shape of its tensors in its metadata, got {shape!r:.80}"
        )
    if len(shape) > _MAX_DIMENSIONS:
        raise errors.FormatError(
            f"column {field.name!r} must have tensors of at most {_MAX_DIMENSIONS} dimensions, got {len(shape)}"
        )
    return tuple(shape)


def _tensor(chunk: pa.Array, shape: tuple[int, ...], name: str) -> pa.Array:
    storage = _storage_of(chunk)
    size = prod(shape)
    if not size or not _is_list(storage.type) or storage.null_count or not np.all(_lengths(storage) == size):
        actual = "other lengths" if _is_list(storage.type) and not storage.null_count else f"{storage.type!s:.80}"
        raise errors.FormatError(
            f"column {name!r} must have {size} elements per row, the product of its shape {shape}, got {actual}"
        )
    rows = storage.flatten()
    for extent in reversed(shape):
        rows = pa.FixedSizeListArray.from_arrays(rows, extent)
    return rows


def _lists(chunk: pa.Array, name: str) -> pa.Array:
    storage = _storage_of(chunk)
    kind = storage.type
    field_indices = [kind.get_field_index(part) for part in ("data", "shape")] if pa.types.is_struct(kind) else [-1]
    if min(field_indices) < 0 or storage.null_count:
        raise errors.FormatError(f"column {name!r} must have fields 'data' and 'shape' for each tensor, got {kind}")
    data, shapes = map(storage.field, field_indices)
    if not _is_list(shapes.type) or shapes.null_count or not np.all(_lengths(shapes) <= 1):
        raise errors.FormatError(
            f"column {name!r} must have tensors of equal shape, or one-dimensional tensors, got several shapes"
        )
    return data


def _storage_of(chunk: pa.Array) -> pa.Array:
    return chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _lengths(lists: pa.Array) -> Any:
    return np.diff(lists.offsets.to_numpy())

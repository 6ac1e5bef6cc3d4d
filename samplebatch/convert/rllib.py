"""RLlib: episodes of its new API stack, and offline data in JSON, Parquet and msgpack."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import names
from samplebatch.batch.concat import concat_samples
from samplebatch.batch.inert_pickle import looks_packed, unpack
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.memory import MemoryBound
from samplebatch.column.types import named_dtype
from samplebatch.column.unpickling import unpickle
from samplebatch.convert import experience
from samplebatch.convert.ray_data import without_ray_types
from samplebatch.errors import ColumnTypeError, FormatError, SampleBatchError, require
from samplebatch.storage.files import replacing

if TYPE_CHECKING:
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
"""Columns that an episode has in other places than its extra model outputs, or not at all."""


class EpisodeParts(NamedTuple):
    """Parts of an episode of one agent, as lists of steps or arrays; the lookback before its first step is cut."""

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
        """Return the steps; arrays are shared, lists are stacked."""
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
    """Return the steps of RLlib's episodes.

    The id of an episode is `eps_id`; what stands before its first step (its lookback) is left out. Extra model outputs
    are columns of their own names.

    Parameters
    ----------
    episodes
        Episodes of one kind, converted to NumPy or not. A single one that is converted is not copied.

    Returns
    -------
    SampleBatch or MultiAgentBatch
        Of episodes of several agents, a batch for each module, in which `agent_id` and `t`, the environment's time,
        tell the rows. An action whose outcome no agent has seen yet is left out.

    Raises
    ------
    ColumnTypeError
        If there is no episode, one of another kind, or values of a column vary in shape.
    ColumnMismatchError
        If episodes differ in their columns, or steps in how they are nested.

    Examples
    --------
    >>> from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    >>> episode = SingleAgentEpisode(observations=[0.0, 1.0, 2.0], actions=[1, 0], rewards=[0.5, 1.0], terminated=True,
    ...     len_lookback_buffer=0)
    >>> batch = from_rllib_episodes([episode])
    >>> batch["new_obs"].tolist(), batch["terminateds"].tolist()
    ([1.0, 2.0], [False, True])
    """
    given = list(episodes)
    if given and all(hasattr(episode, "agent_episodes") for episode in given):
        return _from_several_agents(given)
    if not given or not all(hasattr(episode, "extra_model_outputs") for episode in given):
        raise ColumnTypeError("episodes of RLlib must be of one kind, and one at least, to be converted")
    return experience.join_episodes([parts_of(episode).to_batch() for episode in given])


def parts_of(episode: Any) -> EpisodeParts:
    """Take an episode of one agent apart."""

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
    """Cut the first rows off a list of steps, or off each array of a tree."""
    if isinstance(data, list):
        return data[lookback:]
    return experience.map_leaves(lambda _, leaf: leaf[lookback:], data, "")


def _stack(steps: Any, path: str) -> Any:
    """Stack a list of arrays or trees; arrays are returned unchanged."""
    return experience.stack_steps(steps, path) if isinstance(steps, list) else steps


def _from_several_agents(episodes: list[Any]) -> MultiAgentBatch:
    by_module: dict[str, list[SampleBatch]] = {}
    for episode in episodes:
        for index, (agent, own) in enumerate(sorted(episode.agent_episodes.items(), key=lambda item: str(item[0]))):
            batch = parts_of(own).to_batch()
            if not batch.count:
                continue
            batch[names.EPS_ID] = np.full(batch.count, str(episode.id_))
            batch[AGENT_ID] = np.full(batch.count, str(agent))
            batch[names.AGENT_INDEX] = np.full(batch.count, index)
            batch[names.T] = _env_times(episode, agent)[: batch.count]
            module = own.module_id if own.module_id is not None else episode.module_for(agent)
            by_module.setdefault(str(module), []).append(batch)
    policies = {module: experience.join_episodes(batches) for module, batches in by_module.items()}
    return MultiAgentBatch(policies, sum(map(len, episodes)))


def _env_times(episode: Any, agent: Any) -> npt.NDArray[np.int64]:
    """Return the environment's times at which an agent observed, from the episode's first step on."""
    steps = episode.env_t_to_agent_t[agent]
    data = list(steps.data)[steps.lookback :]
    observed = [i for i, t in enumerate(data) if t != episode.SKIP_ENV_TS_TAG]
    return np.array(observed, np.int64) + np.int64(episode.env_t_started)


# Writing


def to_rllib_episodes(
    source: experience.Source, *, observation_space: Any = None, action_space: Any = None
) -> list[SingleAgentEpisode] | list[MultiAgentEpisode]:
    """Return steps as RLlib's episodes, already converted to NumPy.

    Columns that RLlib has no place for (`action_logp`, `vf_preds`, ...) become extra model outputs; the `state_in` of
    one agent's steps becomes the `state_out` of those before them, which learners of recurrent modules look for.
    Observations are shared where `obs` and `new_obs` are views of the same ones, as `from_rllib_episodes` gives them.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments. A MultiAgentBatch gives episodes of several agents, which are
        called by `agent_id`, or by `agent_index` if there is none; it must have `eps_id` and `t`.
    observation_space, action_space
        The spaces that the episodes are to know; of several agents, by agent.

    Raises
    ------
    ColumnNotFoundError, ColumnTypeError
        If a column is missing, or its rows vary in shape; names it.
    SequenceError
        If steps of an agent's episode are missing.
    EmptyBufferError
        If there are no steps.
    MissingExtraError
        If RLlib is not installed.
    """
    if isinstance(source, MultiAgentBatch):
        return _to_several_agents(source, observation_space, action_space)
    module = require("ray.rllib.env.single_agent_episode", "rllib")
    lookback = require("ray.rllib.env.utils.infinite_lookback_buffer", "rllib").InfiniteLookbackBuffer
    made = []
    for episode in _episodes(source):
        terminated, truncated = (bool(flags[-1]) for flags in experience.flags_of(episode))
        parts = {
            "observations": experience.observations_of(episode),
            "actions": experience.arrays_of(episode, names.ACTIONS),
            "rewards": experience.arrays_of(episode, names.REWARDS),
        }
        made.append(
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
    return made


def _model_outputs(episode: SampleBatch, lookback: Any) -> dict[str, Any]:
    """Return the further columns of an episode; of recurrent states those after each step, as RLlib keeps them.

    The state that the first step began with looks back on the episode. That after the last one is not recorded, and
    learners do not look at it: the state before it stands there.
    """
    extras = [name for name in episode if name not in _OWN and name != names.STATE_IN]
    made = {name: lookback(experience.arrays_of(episode, name)) for name in extras}
    if names.STATE_IN in episode and names.STATE_OUT not in episode:
        places = np.append(np.arange(episode.count), episode.count - 1)
        made[names.STATE_OUT] = lookback(_take(experience.arrays_of(episode, names.STATE_IN), places), lookback=1)
    return made


def _take(values: Any, places: Any) -> Any:
    if isinstance(values, dict):
        return {name: _take(value, places) for name, value in values.items()}
    return values[places]


def _episodes(source: experience.Source) -> Iterator[SampleBatch]:
    steps = experience.as_steps(source)
    experience.require_columns(steps.batch, *_TRANSITION)
    return steps.episodes()


def _infos(episode: SampleBatch) -> list[Any]:
    if names.INFOS not in episode:
        return [{} for _ in range(episode.count)]
    # Infos alone count no steps.
    return [row[names.INFOS] or {} for row in episode.select(names.INFOS, names.REWARDS).rows()]


class _AgentSteps(NamedTuple):
    """The steps of an agent in an episode, row by row."""

    agent: Any
    module: str
    rows: list[dict[str, Any]]
    times: list[int]
    terminated: bool
    truncated: bool


def _to_several_agents(source: MultiAgentBatch, observation_space: Any, action_space: Any) -> list[Any]:
    module = require("ray.rllib.env.multi_agent_episode", "rllib")
    by_episode: dict[Any, list[_AgentSteps]] = {}
    for policy, batch in source.policy_batches.items():
        experience.require_columns(batch, names.EPS_ID, names.T, *_TRANSITION)
        for part in _trajectories(batch):
            own = _agent_steps(policy, part)
            by_episode.setdefault(part[names.EPS_ID][0], []).append(own)
    return [
        _episode_of_agents(module.MultiAgentEpisode, str(episode), agents, observation_space, action_space)
        for episode, agents in by_episode.items()
    ]


def _trajectories(batch: SampleBatch) -> Iterator[SampleBatch]:
    """Yield the steps of each agent in each episode; the environment's time leaves out those in which it waits."""
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
    """Order the steps of all agents by environment time, for RLlib's constructor."""
    start = min(own.times[0] for own in agents)
    length = max(own.times[-1] for own in agents) - start + 1
    columns: dict[str, list[dict[Any, Any]]] = {
        key: [{} for _ in range(length + 1)] for key in ("observations", "infos", "actions", "rewards", "extras")
    }
    for own in agents:
        places = [t - start for t in own.times]
        # The observation after an agent's last step is that of the end, for RLlib takes any before as its termination.
        after = [*places[1:], places[-1] + 1 if own.terminated or own.truncated else length]
        for row, place, following in zip(own.rows, places, after, strict=True):
            columns["observations"][place][own.agent] = row[names.OBS]
            columns["observations"][following][own.agent] = row[names.NEXT_OBS]
            columns["infos"][following][own.agent] = row.get(names.INFOS) or {}
            columns["actions"][place][own.agent] = row[names.ACTIONS]
            columns["rewards"][place][own.agent] = row[names.REWARDS]
            columns["extras"][place][own.agent] = {key: row[key] for key in row if key not in _OWN and key != _ENV_T}
    terminateds: dict[Any, bool] = {own.agent: own.terminated for own in agents}
    truncateds: dict[Any, bool] = {own.agent: own.truncated for own in agents}
    terminateds["__all__"] = all(terminateds.values())
    truncateds["__all__"] = not terminateds["__all__"] and all(own.terminated or own.truncated for own in agents)
    made: MultiAgentEpisode = cls(
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
        agent_module_ids={own.agent: own.module for own in agents},
        observation_space=observation_space,
        action_space=action_space,
    )
    return made.to_numpy()


_EPISODE = "item"
"""The column in which Ray Data keeps items that are no dicts."""

_COMPRESSED = (names.OBS, names.NEXT_OBS)
_GROWTH = 32
"""Bytes of memory that a character of JSON may become: two make a number in a list, or an empty list."""


def pack(value: Any) -> str:
    """Pack a value as RLlib's `pack` does: a pickle, compressed with LZ4, in base64.

    >>> pack([1, 2])[:5]
    'BCJNG'
    """
    import lz4.frame

    return base64.b64encode(lz4.frame.compress(pickle.dumps(value, 5))).decode("ascii")


# JSON


def read_rllib_json(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, max_nbytes: int | None = None
) -> SampleBatch | MultiAgentBatch:
    """Read the batches of RLlib's JSON files, and join them.

    Packed columns are pickles; those of arrays and plain values are read as data, without running them.

    Parameters
    ----------
    path
        A file, or a folder of files that end in `.json`.
    allow_pickle
        Whether to unpickle packed columns of other objects. Only for files whose writer you trust: a pickle can run
        any code.
    max_nbytes
        Maximum bytes to allocate per file; None for the larger of 256 MiB and 1024 times its size.

    Raises
    ------
    FormatError
        If a line is no batch as RLlib writes it; names file, line and column.
    UntrustedPickleError
        If a column is of packed objects, and `allow_pickle` is false; names it.
    CapacityError
        If more memory than `max_nbytes` would be allocated.
    ColumnMismatchError
        If the batches differ in their columns.
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
                raise FormatError(f"{str(file)!r} must be text, and it is not: {error}") from error
    if not batches:
        raise FormatError(f"{os.fspath(path)!r} must have batches of RLlib, it has none")
    return concat_samples(batches)


def _read_line(line: str, where: str, bound: MemoryBound, allow_pickle: bool) -> SampleBatch | MultiAgentBatch:
    bound.take(_GROWTH * len(line), where)
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} must be JSON, and it is not: {error}") from error
    kind = found.pop("type", None) if isinstance(found, dict) else None

    def batch_of(columns: Any) -> SampleBatch:
        if not isinstance(columns, dict):
            raise FormatError(f"{where} must have columns by name, it has not")
        return SampleBatch({name: unpacked(value, name) for name, value in columns.items()})

    def unpacked(value: Any, name: str) -> Any:
        subject = f"column {name!r} in {where}"
        return unpack(value, subject, bound, allow_pickle=allow_pickle) if isinstance(value, str) else value

    if kind == "SampleBatch":
        return batch_of(found)
    policies = found.get("policy_batches") if isinstance(found, dict) else None
    if kind != "MultiAgentBatch" or not isinstance(policies, dict):
        raise FormatError(f"{where} must be a SampleBatch or MultiAgentBatch of RLlib, it is neither")
    count = found.get("count")
    if type(count) is not int or count < 0:
        raise FormatError(f"{where} must have a count of environment steps, it has not")
    return MultiAgentBatch({policy: batch_of(columns) for policy, columns in policies.items()}, count)


def write_rllib_json(
    source: experience.Source, path: str | os.PathLike[str], *, compress_columns: Iterable[str] = _COMPRESSED
) -> None:
    """Write experience as RLlib's offline data: a line for each fragment, atomically.

    Parameters
    ----------
    source
        A batch of one or several policies, a buffer, or an iterable of fragments.
    path
        The file; RLlib looks for names that end in `.json`.
    compress_columns
        Columns to pack as RLlib does, which keeps their dtypes; all others become numbers in lists. Nested ones are
        packed in any case.

    Raises
    ------
    ColumnTypeError
        If rows vary in shape, or hold objects that JSON has no form for; names the column.
    EmptyBufferError, SequenceError
        If there are no steps, or they are time-major.
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
        # RLlib reads nested columns only if they are packed.
        columns[name] = pack(values) if name in packed or not isinstance(values, np.ndarray) else _as_json(name, values)
    return columns


def _as_json(path: str, values: npt.NDArray[Any]) -> Any:
    rows = values.tolist()
    if values.dtype.kind in "biuf":
        return rows
    try:
        json.dumps(rows)
    except (TypeError, ValueError) as error:
        raise ColumnTypeError(f"column {path!r} must hold what JSON has a form for, got {values.dtype}") from error
    return rows


# Parquet


def read_rllib_parquet(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, max_nbytes: int | None = None
) -> SampleBatch:
    """Read the steps or episodes that RLlib's new API stack has recorded in Parquet files.

    Packed values are pickles; those of arrays and plain values are read as data, without running them.

    Parameters
    ----------
    path
        A file, or a folder of files that end in `.parquet`, in folders of their own or not.
    allow_pickle
        Whether to unpickle other objects. Only for files whose writer you trust: a pickle can run any code.
    max_nbytes
        Maximum bytes to allocate per file; None for the larger of 256 MiB and 1024 times its size.

    Raises
    ------
    FormatError
        If a file is damaged, or a value in it is not as RLlib writes it; names file and column.
    UntrustedPickleError
        If a value is a packed object, and `allow_pickle` is false; names the column.
    CapacityError
        If more memory than `max_nbytes` would be allocated; names the column.
    ColumnMismatchError
        If files differ in their columns, or packed values of one in how they are nested.
    MissingExtraError
        If msgpack is not installed and there are episodes in it.
    OSError
        If a file cannot be read.
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
        # Columns of ids are strings, too, but are not packed.
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
    msgpack = require("msgpack", "rllib")
    batches = []
    for number, data in enumerate(column.to_pylist()):
        subject = f"episode {number}"
        if not isinstance(data, bytes):
            raise FormatError(f"{subject} must be bytes of msgpack, got a {type(data).__name__}")
        bound.take(16 * len(data), subject)

        def decode(found: dict[Any, Any], subject: str = subject) -> Any:
            return _decode(found, subject, allow_pickle)

        try:
            state = msgpack.unpackb(data, object_hook=decode, strict_map_key=False)
            batches.append(_parts_in(state).to_batch())
        except SampleBatchError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise FormatError(f"{subject} must be an episode of RLlib in msgpack, and it is not: {error}") from error
    return batches


def _parts_in(state: dict[str, Any]) -> EpisodeParts:
    """Split the state of an episode from `SingleAgentEpisode.get_state`."""

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


def _decode(found: dict[Any, Any], subject: str, allow_pickle: bool) -> Any:
    """Create an array or a number of the dict by which `msgpack_numpy` describes it."""
    if found.get(b"complex") is True:
        return complex(found[b"data"])
    if b"nd" not in found:
        return found
    if found.get(b"kind") == b"O":
        return unpickle([found[b"data"]], subject, allow_pickle=allow_pickle)[0]
    if found.get(b"kind") == b"V" or not isinstance(found[b"type"], str):
        raise FormatError(f"{subject} must have arrays of numbers, it has others")
    values = np.frombuffer(found[b"data"], named_dtype(found[b"type"]))
    return values.reshape(found[b"shape"]) if found[b"nd"] is True else values[0]


def write_rllib_parquet(
    source: experience.Source, path: str | os.PathLike[str], *, compress_columns: Iterable[str] = _COMPRESSED
) -> None:
    """Write steps as a Parquet file of rows, as RLlib's offline stack reads them (`input_read_method="read_parquet"`).

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.
    path
        The file.
    compress_columns
        Columns to pack row by row as RLlib does, which keeps shapes of two dimensions and more; nested ones have to be.

    Raises
    ------
    ColumnNotFoundError
        If there are no rewards, or no column separates episodes.
    ColumnTypeError
        If a column that is not packed is nested, or has rows that vary in shape; names it.
    EmptyBufferError, SequenceError
        If there are no steps, or some of an episode are missing.
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
        raise ColumnTypeError(f"column {name!r} is nested and must be packed; name it in compress_columns")
    return pa.array(list(values) if values.ndim == 2 else values.tolist() if values.ndim > 2 else values)


def write_rllib_episodes(source: experience.Source, path: str | os.PathLike[str]) -> None:
    """Write episodes as a Parquet file of msgpack, as RLlib's offline stack reads them (`input_read_episodes=True`).

    Raises
    ------
    ColumnNotFoundError, ColumnTypeError, EmptyBufferError, SequenceError
        As `to_rllib_episodes` does.
    MissingExtraError
        If RLlib or msgpack is not installed.
    OSError
        If the file cannot be written.
    """
    from pyarrow import parquet

    msgpack = require("msgpack", "rllib")
    episodes: list[Any] = to_rllib_episodes(experience.as_steps(source).batch)
    rows = [msgpack.packb(episode.get_state(), default=_encode) for episode in episodes]
    with replacing(path) as file:
        parquet.write_table(pa.table({_EPISODE: pa.array(rows, pa.large_binary())}), file)


def _encode(value: Any) -> Any:
    """Describe an array or a number as `msgpack_numpy` does."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return value.tolist()
    if isinstance(value, np.ndarray):
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": value.tobytes()}
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(f"an episode must have values that msgpack has a form for, got a {type(value).__name__}")

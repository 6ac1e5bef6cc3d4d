"""Replay buffers of several agents in folders: a file for each policy, and a manifest that lists them.

The files of a newer state have other names. The manifest is replaced at once when they are there, and the older files
go then: a process that is killed leaves the one state or the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch.buffer.env_steps import EnvSteps
from samplebatch.buffer.extending import Tail
from samplebatch.buffer.multi_agent import Form, MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import FormatError, StorageError
from samplebatch.names import PolicyID, label_policies
from samplebatch.storage.buffers.file import read_buffer, write_buffer
from samplebatch.storage.buffers.state import (
    buffer_class,
    check_fragments,
    generator_from_state,
    generator_state,
    is_plain,
    plain,
)
from samplebatch.storage.files import plain_bytes, read_plain, replacing, sync
from samplebatch.storage.foreign.damage import name_buffer_damage

if TYPE_CHECKING:
    from samplebatch.storage.buffers.state import State

MANIFEST = "policies.json"
_VERSION = 1


def write_policies(buffer: MultiAgentReplayBuffer, path: str | os.PathLike[str], compression: str | None) -> None:
    """Write a buffer of several agents into a folder, in place of the one that was written there before."""
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise StorageError(f"{str(folder)!r} must be a new folder, or one of such a buffer; it holds other files")
    folder.mkdir(exist_ok=True)
    with buffer._lock:
        about = _describe(buffer)
        mark = secrets.token_hex(4)
        files = {label: f"{i}-{mark}.arrow" for i, label in enumerate(_label(buffer, buffer.buffers))}
        for name, own in zip(files.values(), buffer.buffers.values(), strict=True):
            write_buffer(own, folder / name, "Arrow", compression)
    with replacing(folder / MANIFEST) as file:
        file.write(plain_bytes(about | {"files": files}))
    sync(folder)
    for older in folder.glob("*.arrow"):
        if older.name not in files.values():
            with contextlib.suppress(FileNotFoundError):
                older.unlink()


def _describe(buffer: MultiAgentReplayBuffer) -> State:
    strange = [name for name, value in buffer._options.items() if not is_plain(value)]
    if strange:
        raise StorageError(f"a buffer of several agents must have plain options to be saved, {strange[0]!r} is none")
    steps = buffer._steps.state_dict()
    return {
        "version": _VERSION,
        "type": "MultiAgentReplayBuffer",
        "size": plain(_label(buffer, buffer._size) if isinstance(buffer._size, dict) else buffer._size),
        "ids": {label: int(policy) for policy, label in _labels(buffer).items() if not isinstance(policy, str)},
        "lockstep": buffer.lockstep,
        "kind": buffer._kind.__name__,
        "options": plain(buffer._options),
        "seed": plain(buffer._seed),
        "forms": {
            label: [sorted(form.flags), form.rewards.str] for label, form in _label(buffer, buffer._forms).items()
        },
        "tails": {
            label: [plain(_item(part)) for part in tail] for label, tail in _label(buffer, buffer._tails).items()
        },
        "steps": _plain_steps(steps | {"buffers": _label(buffer, steps["buffers"])}),
        "generator": generator_state(buffer._rng),
    }


def _labels(buffer: MultiAgentReplayBuffer) -> dict[PolicyID, str]:
    """Give each policy a string, as JSON has no other keys."""
    return label_policies(dict.fromkeys([*buffer.buffers, *(buffer._size if isinstance(buffer._size, dict) else ())]))


def _label(buffer: MultiAgentReplayBuffer, values: Mapping[PolicyID, Any]) -> State:
    """Return values by policy by the policies' strings."""
    labels = _labels(buffer)
    return {labels[policy]: value for policy, value in values.items()}


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _plain_steps(state: Mapping[str, Any]) -> State:
    """Convert arrays to lists beside their dtypes, for JSON."""
    found: State = json.loads(
        json.dumps(state, default=lambda array: {"dtype": array.dtype.str, "values": array.tolist()})
    )
    return found


def _steps(plain_state: Any) -> Any:
    """Undo `_plain_steps`."""
    if isinstance(plain_state, dict):
        if plain_state.keys() == {"dtype", "values"}:
            return np.array(plain_state["values"], np.dtype(str(plain_state["dtype"])))
        return {name: _steps(value) for name, value in plain_state.items()}
    return plain_state


def files_of(folder: Path) -> list[Path]:
    """List the files of the policies."""
    return [folder / os.path.basename(str(file)) for file in read_plain(folder / MANIFEST).get("files", {}).values()]


def read_policies(
    path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    verify: bool = True,
    max_nbytes: int | None = None,
    missing: dict[str, Any],
) -> MultiAgentReplayBuffer:
    """Read a buffer of several agents from the folder of `write_policies`; parameters as of `read_buffer`."""
    folder = Path(path)
    about = read_plain(folder / MANIFEST)
    if about.get("type") != "MultiAgentReplayBuffer" or about.get("version") != _VERSION:
        raise FormatError(f"{str(folder)!r} must hold a buffer of several agents of version {_VERSION}, it does not")
    trust: dict[str, Any] = {"allow_pickle": allow_pickle, "verify": verify, "max_nbytes": max_nbytes}
    with name_buffer_damage(str(folder)):
        ids = dict(about.get("ids", {}))
        if not all(type(number) is int for number in ids.values()):
            raise FormatError(f"{str(folder)!r} must have integers for ids of policies that are no strings, it has not")
        kind = buffer_class(about["kind"], ReplayBuffer)
        size = about["size"]
        if isinstance(size, dict):
            size = {ids.get(label, label): own for label, own in size.items()}
        buffer = MultiAgentReplayBuffer(
            size, lockstep=about["lockstep"], kind=kind, seed=about["seed"], **about["options"]
        )
        for label, file in about["files"].items():
            policy = ids.get(label, label)
            if os.path.basename(file) != file or not (folder / file).is_file():
                raise FormatError(f"{str(folder)!r} must have the file of policy {policy!r}, and {file!r} is missing")
            own = read_buffer(kind, folder / file, "Arrow", missing=missing, **trust)
            own._table.lock = buffer._lock
            buffer.buffers[policy] = own
        buffer._forms = {
            ids.get(label, label): Form(frozenset(flags), np.dtype(dtype))
            for label, (flags, dtype) in about["forms"].items()
        }
        check_fragments(buffer.buffers, buffer._forms)
        buffer._tails = {ids.get(label, label): Tail(*tail) for label, tail in about["tails"].items()}
        steps = _steps(about["steps"])
        steps["buffers"] = {ids.get(label, label): own for label, own in steps["buffers"].items()}
        buffer._steps = EnvSteps.from_state_dict(steps)
        buffer._rng = generator_from_state(about["generator"])
    return buffer

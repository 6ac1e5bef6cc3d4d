"""Multi-agent replay buffers in folders: one file per policy, and a manifest that lists the files.

A newer state uses new file names. The manifest is replaced atomically once they are written, and the older files are
deleted afterwards: a killed process leaves one consistent state.
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
    """Write a multi-agent buffer into a folder, replacing an earlier one."""
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise StorageError(f"{str(folder)!r} must be a new folder or one with a multi-agent buffer, got other files")
    folder.mkdir(exist_ok=True)
    with buffer._lock:
        about = _describe(buffer)
        mark = secrets.token_hex(4)
        files = {label: f"{i}-{mark}.arrow" for i, label in enumerate(_label(buffer, buffer.buffers))}
        for name, policy_buffer in zip(files.values(), buffer.buffers.values(), strict=True):
            write_buffer(policy_buffer, folder / name, "Arrow", compression)
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
        raise StorageError(
            f"a multi-agent buffer must have plain options to be saved, got another value in {strange[0]!r}"
        )
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
    """Return a string per policy, because JSON has only string keys."""
    return label_policies(dict.fromkeys([*buffer.buffers, *(buffer._size if isinstance(buffer._size, dict) else ())]))


def _label(buffer: MultiAgentReplayBuffer, values: Mapping[PolicyID, Any]) -> State:
    """Replace policies by their strings in a mapping."""
    labels = _labels(buffer)
    return {labels[policy]: value for policy, value in values.items()}


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _plain_steps(state: Mapping[str, Any]) -> State:
    """Convert arrays to lists with their dtypes, for JSON."""
    plain_state: State = json.loads(
        json.dumps(state, default=lambda array: {"dtype": array.dtype.str, "values": array.tolist()})
    )
    return plain_state


def _steps(plain_state: Any) -> Any:
    """Invert `_plain_steps`."""
    if isinstance(plain_state, dict):
        if plain_state.keys() == {"dtype", "values"}:
            return np.array(plain_state["values"], np.dtype(str(plain_state["dtype"])))
        return {name: _steps(value) for name, value in plain_state.items()}
    return plain_state


def files_of(folder: Path) -> list[Path]:
    """List the files of all policies."""
    return [folder / os.path.basename(str(file)) for file in read_plain(folder / MANIFEST).get("files", {}).values()]


def read_policies(
    path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    verify: bool = True,
    max_nbytes: int | None = None,
    missing: dict[str, Any],
) -> MultiAgentReplayBuffer:
    """Read a multi-agent buffer from a folder of `write_policies`; parameters as in `read_buffer`."""
    folder = Path(path)
    about = read_plain(folder / MANIFEST)
    if about.get("type") != "MultiAgentReplayBuffer" or about.get("version") != _VERSION:
        raise FormatError(f"{str(folder)!r} must contain a multi-agent buffer of version {_VERSION}, got another")
    trust: dict[str, Any] = {"allow_pickle": allow_pickle, "verify": verify, "max_nbytes": max_nbytes}
    with name_buffer_damage(str(folder)):
        ids = dict(about.get("ids", {}))
        if not all(type(number) is int for number in ids.values()):
            raise FormatError(f"{str(folder)!r} must have integer ids for policies without string ids, got others")
        kind = buffer_class(about["kind"], ReplayBuffer)
        size = about["size"]
        if isinstance(size, dict):
            size = {ids.get(label, label): policy_value for label, policy_value in size.items()}
        buffer = MultiAgentReplayBuffer(
            size, lockstep=about["lockstep"], kind=kind, seed=about["seed"], **about["options"]
        )
        for label, file in about["files"].items():
            policy = ids.get(label, label)
            if os.path.basename(file) != file or not (folder / file).is_file():
                raise FormatError(f"{str(folder)!r} must have the file of policy {policy!r}, got no file {file!r}")
            policy_value = read_buffer(kind, folder / file, "Arrow", missing=missing, **trust)
            policy_value._table.lock = buffer._lock
            buffer.buffers[policy] = policy_value
        buffer._forms = {
            ids.get(label, label): Form(frozenset(flags), np.dtype(dtype))
            for label, (flags, dtype) in about["forms"].items()
        }
        check_fragments(buffer.buffers, buffer._forms)
        buffer._tails = {ids.get(label, label): Tail(*tail) for label, tail in about["tails"].items()}
        steps = _steps(about["steps"])
        steps["buffers"] = {ids.get(label, label): policy_value for label, policy_value in steps["buffers"].items()}
        buffer._steps = EnvSteps.from_state_dict(steps)
        buffer._rng = generator_from_state(about["generator"])
    return buffer

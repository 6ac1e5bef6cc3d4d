"""Files in D4RL's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch.convert import read_d4rl, write_d4rl
from samplebatch.errors import (
    CapacityError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    FormatError,
)
from tests.convert.experience import two_episodes

h5py = pytest.importorskip("h5py")


def write(path: Path, **changed: Any) -> Path:
    """Write a file like D4RL's collectors."""
    values: dict[str, Any] = {
        "observations": np.arange(10, dtype=np.float32).reshape(5, 2),
        "actions": np.ones((5, 1), np.float32),
        "rewards": np.arange(5, dtype=np.float32)[:, None],
        "terminals": np.array([0, 0, 1, 0, 0], np.uint8),
        "timeouts": np.array([0, 0, 0, 0, 1], bool),
        "infos/qpos": np.arange(15.0).reshape(5, 3),
        "metadata/algorithm": np.bytes_("SAC"),
        "metadata/policy/weight": np.ones((3, 2)),
    }
    with h5py.File(path, "w") as file:
        for name, value in (values | changed).items():
            if value is not None:
                file[name] = value
    return path


def test_a_file_becomes_episodes(tmp_path: Path) -> None:
    batch = read_d4rl(write(tmp_path / "a.hdf5"))
    assert set(batch) == {"obs", "actions", "rewards", "terminateds", "truncateds", "infos", "eps_id", "t"}
    assert batch["rewards"].tolist() == [0, 1, 2, 3, 4]
    assert batch["terminateds"].tolist() == [False, False, True, False, False]
    assert batch["truncateds"].tolist() == [False, False, False, False, True]
    assert batch["eps_id"].tolist() == [0, 0, 0, 1, 1]
    assert batch["t"].tolist() == [0, 1, 2, 0, 1]
    assert batch["infos"]["qpos"].shape == (5, 3)


def test_stored_next_observations_are_read(tmp_path: Path) -> None:
    batch = read_d4rl(write(tmp_path / "a.hdf5", next_observations=np.ones((5, 2)), timeouts=None))
    assert batch["new_obs"].tolist() == np.ones((5, 2)).tolist()
    assert "truncateds" not in batch
    assert batch["eps_id"].tolist() == [0, 0, 0, 1, 1]


def test_a_written_file_is_read_exactly(tmp_path: Path) -> None:
    batch = two_episodes()
    batch["infos"] = {"qpos": np.arange(10.0).reshape(5, 2)}
    batch["action_logp"] = np.arange(5.0)
    write_d4rl(batch, tmp_path / "a.hdf5")
    actual = read_d4rl(tmp_path / "a.hdf5")
    assert set(actual) == set(batch)
    for path in batch.column_names:
        assert actual[path].tolist() == batch[path].tolist()
        assert actual[path].dtype == batch[path].dtype


def test_the_end_of_an_unfinished_episode_is_a_timeout(tmp_path: Path) -> None:
    write_d4rl(two_episodes()[:2], tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert file["timeouts"][:].tolist() == [False, True]
        assert file["terminals"][:].tolist() == [False, False]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"rewards": None}, ColumnNotFoundError, "must contain dataset 'rewards'"),
        ({"terminals": None}, ColumnNotFoundError, "must contain dataset 'terminals'"),
        ({"rewards": np.ones(4)}, ColumnLengthError, "'rewards' must have 5 rows"),
        ({"terminals": np.full(5, 0.5)}, ColumnMismatchError, "column 'terminateds' must have flags"),
        ({"observations": np.float32(1)}, ColumnTypeError, "column 'obs'"),
    ],
)
def test_incomplete_files_are_rejected(tmp_path: Path, changed: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        read_d4rl(write(tmp_path / "a.hdf5", **changed))


def test_foreign_and_inconsistent_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.hdf5").write_bytes(b"nothing of the sort")
    with pytest.raises(FormatError, match="must be an HDF5 file"):
        read_d4rl(tmp_path / "a.hdf5")
    with h5py.File(write(tmp_path / "b.hdf5", rewards=None), "a") as file:
        file.create_dataset("rewards", (1 << 34,), np.float64, chunks=(1 << 20,), compression="gzip")
    with pytest.raises(CapacityError, match="rewards"):
        read_d4rl(tmp_path / "b.hdf5")
    with h5py.File(write(tmp_path / "c.hdf5", rewards=None), "a") as file:
        file["rewards"] = h5py.ExternalLink(str(tmp_path / "d.hdf5"), "rewards")
    with pytest.raises(FormatError, match="rewards must be in the file itself"):
        read_d4rl(tmp_path / "c.hdf5")


def test_columns_without_a_d4rl_counterpart_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ColumnTypeError, match="column 'obs' must be a single array in a D4RL file, got nested columns"):
        write_d4rl(two_episodes(nested=True), tmp_path / "a.hdf5")
    batch = two_episodes()
    batch["infos"] = [{"lives": 3}] * 5
    with pytest.raises(ColumnTypeError, match="column 'infos' must be numeric"):
        write_d4rl(batch, tmp_path / "a.hdf5")
    assert not list(tmp_path.iterdir())

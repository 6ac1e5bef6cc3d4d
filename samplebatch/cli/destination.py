"""Where collected steps go: into one file at the end, or into a dataset as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.rollout.aggregator import Aggregator
from samplebatch.storage.arrow_file import check_writable
from samplebatch.storage.dataset import Dataset
from samplebatch.storage.saving import load, save
from samplebatch.storage.suffixes import form_to_write

AnyBatch = SampleBatch | MultiAgentBatch


class Destination(ABC):
    """Takes fragments in; `finish` returns them as one batch, written.

    Attributes
    ----------
    fragments
        Fragments taken in.
    env_steps, agent_steps
        Environment steps in them, and steps of all agents.
    """

    fragments = env_steps = agent_steps = 0

    def add(self, fragment: AnyBatch) -> None:
        """Take a fragment in."""
        self.take(fragment)
        self.fragments += 1
        self.env_steps += fragment.env_steps()
        self.agent_steps += fragment.agent_steps()

    @abstractmethod
    def take(self, fragment: AnyBatch) -> None:
        """Keep or write a fragment."""

    @abstractmethod
    def finish(self) -> tuple[AnyBatch, int]:
        """Write the rest, and return all steps and the bytes that they take on the disk."""


class OneFile(Destination):
    """A single Arrow or Parquet file, written at the end; an older one is replaced."""

    def __init__(self, path: Path) -> None:
        form_to_write(path)
        check_writable(path)
        self._path = path
        self._aggregator = Aggregator()

    def take(self, fragment: AnyBatch) -> None:
        """Keep a fragment."""
        self._aggregator.add(fragment)

    def finish(self) -> tuple[AnyBatch, int]:
        """Join the fragments, and write them."""
        batch = self._aggregator.build_and_reset()
        save(batch, self._path)
        return batch, self._path.stat().st_size


class Folder(Destination):
    """A folder that gets a Parquet file for every fragment; those that are there stay."""

    def __init__(self, path: Path) -> None:
        self._dataset = Dataset(path)
        self._nbytes = 0

    def take(self, fragment: AnyBatch) -> None:
        """Write a fragment."""
        self._nbytes += self._dataset.append(fragment).stat().st_size

    def finish(self) -> tuple[AnyBatch, int]:
        """Read the folder; the bytes are those of this run."""
        batch: Any = self._dataset.read()
        return batch, self._nbytes


def destination(path: Path) -> Destination:
    """Tell the kind of a path: a folder is one that is there, or has a name without an ending.

    Raises
    ------
    OSError
        If nothing can be written there.
    """
    return Folder(path) if path.is_dir() or not path.suffix else OneFile(path)


def read_any(path: Path, *, allow_pickle: bool = False) -> AnyBatch:
    """Read a file or folder of any format as a batch, a buffer's rows in time order; raises as `load` does."""
    found: Any = load(path, allow_pickle=allow_pickle, verify=True)
    if isinstance(found, ReplayBuffer):
        with found as buffer:
            found = buffer.sample(0)[0] if len(buffer) else Batch()
    elif isinstance(found, MultiAgentReplayBuffer):
        found = found.sample(0)
    batch: AnyBatch = found.as_sample_batch(names="rllib") if isinstance(found, Batch) else found
    return batch

"""Aggregator: joins fragments into one batch."""

from __future__ import annotations

from samplebatch.batch.concat import concat_samples_into_ma_batch
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.rollout.statistics import finished_episodes


class Aggregator:
    """Gather fragments, and join them into one batch at the end, one copy of every byte.

    Every step that goes in comes out: `env_steps` and `agent_steps` are the sums of the fragments'.

    Attributes
    ----------
    fragments : int
        Fragments added since the last batch.
    env_steps : int
        Environment steps in them.
    agent_steps : int
        Steps of all agents in them.
    nbytes : int
        Bytes of their columns.
    episodes : int
        Episodes that ended in them.

    Examples
    --------
    >>> from samplebatch.batch.sample_batch import SampleBatch
    >>> aggregator = Aggregator()
    >>> aggregator.add(MultiAgentBatch({"walker": SampleBatch(rewards=[1.0, 2.0])}, 2))
    >>> aggregator.add(MultiAgentBatch({"walker": SampleBatch(rewards=[3.0])}, 1))
    >>> aggregator.build_and_reset()["walker"]["rewards"].tolist(), aggregator.env_steps
    ([1.0, 2.0, 3.0], 0)
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._fragments: list[MultiAgentBatch] = []
        self.env_steps = 0
        self.agent_steps = 0
        self.nbytes = 0
        self.episodes = 0

    @property
    def fragments(self) -> int:
        """Fragments added since the last batch."""
        return len(self._fragments)

    def add(self, fragment: MultiAgentBatch) -> None:
        """Take a fragment in; it is kept, not copied."""
        self._fragments.append(fragment)
        self.env_steps += fragment.env_steps()
        self.agent_steps += fragment.agent_steps()
        self.nbytes += fragment.size_bytes()
        self.episodes += len(finished_episodes(fragment))

    def build_and_reset(self) -> MultiAgentBatch:
        """Join all fragments, in the order in which they were added, and start anew.

        Raises
        ------
        ColumnMismatchError
            If the fragments' columns, dtypes or row shapes differ; the fragments are kept then.
        """
        batch = concat_samples_into_ma_batch(self._fragments)
        self._clear()
        return batch

"""MultiAgentBatchBuilder: builds a batch of several agents step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.builder import FIRST_CAPACITY, SampleBatchBuilder
from samplebatch.batch.concat import join
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import PolicyNotFoundError, near_names
from samplebatch.names import PolicyID

PolicyMapping = Mapping[Any, PolicyID] | Callable[..., PolicyID]
"""Policy that acts for an agent: a mapping from agent id to policy id, or a function of the agent id."""


class MultiAgentBatchBuilder:
    """Builder of a `MultiAgentBatch`, step by step and agent by agent, for users who step environments themselves.

    In the batch each policy's agents lie one after the other, in the order in which they first acted, and the steps
    of each in the order in which they were added.

    Parameters
    ----------
    policy_mapping
        The policy that acts for an agent: a mapping from agent id to policy id, or a function of the agent id. By
        default one policy, `default_policy`, acts for all.
    dtypes, ragged
        As for `SampleBatchBuilder`, for every agent.

    Attributes
    ----------
    count : int
        Environment steps ended since the last batch.

    Examples
    --------
    >>> builder = MultiAgentBatchBuilder(lambda agent: agent.split("_")[0])
    >>> for t in range(2):
    ...     builder.add_values("cat_0", t=t, rewards=1.0)
    ...     builder.add_values("dog_0", t=t, rewards=2.0)
    ...     builder.add_values("dog_1", t=t, rewards=3.0)
    ...     builder.end_env_step()
    >>> batch = builder.build_and_reset()
    >>> batch.count, batch["dog"]["rewards"].tolist()
    (2, [2.0, 2.0, 3.0, 3.0])
    """

    __slots__ = ("_agents", "_capacities", "_dtypes", "_policy_mapping", "_ragged", "count")

    def __init__(
        self,
        policy_mapping: PolicyMapping | None = None,
        *,
        dtypes: Mapping[str, npt.DTypeLike] | None = None,
        ragged: Collection[str] = (),
    ) -> None:
        self._policy_mapping = policy_mapping
        self._dtypes = dtypes
        self._ragged = ragged
        self._agents: dict[Any, tuple[PolicyID, SampleBatchBuilder]] = {}
        self._capacities: dict[Any, int] = {}
        self.count = 0

    @property
    def agent_steps(self) -> int:
        """Steps of all agents added since the last batch."""
        return sum(builder.count for _, builder in self._agents.values())

    def has_pending_agent_data(self) -> bool:
        """Tell whether there are steps that no batch has yet."""
        return any(builder.count for _, builder in self._agents.values())

    def add_values(self, agent_id: Any, /, **values: Any) -> None:
        """Add one step of one agent; raises as `SampleBatchBuilder.add_values` does.

        Raises
        ------
        PolicyNotFoundError
            If the mapping has no policy for the agent.
        """
        found = self._agents.get(agent_id)
        (found[1] if found is not None else self._builder(agent_id)).add_values(**values)

    def add_steps(self, agent_id: Any, /, **arrays: Any) -> None:
        """Add several steps of one agent; raises as `SampleBatchBuilder.add_steps` does."""
        found = self._agents.get(agent_id)
        (found[1] if found is not None else self._builder(agent_id)).add_steps(**arrays)

    def end_env_step(self, steps: int = 1) -> None:
        """Count an environment step, of which every agent that took part has added its values."""
        self.count += steps

    def build_and_reset(self) -> MultiAgentBatch:
        """Return all steps added so far as a batch, and start an empty one.

        The columns of a policy with one agent are not copied, those of several agents are joined with one copy.

        Raises
        ------
        ColumnMismatchError
            If agents of one policy differ in their columns, dtypes or row shapes. The builder then keeps its steps.
        """
        policies: dict[PolicyID, list[SampleBatch]] = {}
        for policy_id, builder in self._agents.values():
            if builder.count:
                policies.setdefault(policy_id, []).append(builder._build())
        batch = MultiAgentBatch(
            {policy_id: join(parts) if len(parts) > 1 else parts[0] for policy_id, parts in policies.items()},
            self.count,
        )
        self._capacities = {agent_id: builder.count for agent_id, (_, builder) in self._agents.items()}
        self._agents = {}
        self.count = 0
        return batch

    def _builder(self, agent_id: Any) -> SampleBatchBuilder:
        capacity = self._capacities.get(agent_id, FIRST_CAPACITY)
        builder = SampleBatchBuilder(dtypes=self._dtypes, ragged=self._ragged, capacity=capacity)
        self._agents[agent_id] = (self._policy_of(agent_id), builder)
        return builder

    def _policy_of(self, agent_id: Any) -> PolicyID:
        mapping = self._policy_mapping
        if mapping is None:
            return names.DEFAULT_POLICY_ID
        if not isinstance(mapping, Mapping):
            return mapping(agent_id)
        if agent_id not in mapping:
            raise PolicyNotFoundError(
                f"agent {agent_id!r} must have a policy in policy_mapping; {near_names(agent_id, mapping)}"
            )
        return mapping[agent_id]

"""Actor: a policy with exploration noise and an action map, which acts on batches of observations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from samplebatch import names
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.distributions import get_sliced_dist
from samplebatch.batch.nested.functions import to_numpy
from samplebatch.batch.nested.node import KINDS, NODE, node, values_of
from samplebatch.env.infos import Rows
from samplebatch.env.spaces import Columns, Leaf, SpaceLayout, column_names
from samplebatch.errors import PolicySpecError
from samplebatch.policy import action_map
from samplebatch.policy import state as policy_state
from samplebatch.policy.as_policy import Decision, as_policy, unwrap_policy
from samplebatch.policy.random import RandomByEnvironment, RandomPolicy

_RECORDED = (names.ACTION_LOGP, names.ACTION_PROB, names.ACTION_DIST_INPUTS, names.VF_PREDS)
"""Columns of a decision that are recorded besides actions, state and `policy`."""
_NUMBERS = "biufc"
_new_tuple = tuple.__new__
"""Constructor of named tuples that runs no Python code."""


class ActResult(NamedTuple):
    """Actions of n environments, with the columns to record for each step.

    - `columns`: columns with values from before the environments' step: observations, actions and further columns of
      the policy.
    - `actions`: leaves of the actions in the unit of the environments.
    - `state`: recurrent state for the next step; None if the policy has no state. - `decision`: the policy's complete
    result, a `Decision`.
    """

    columns: Columns
    actions: Sequence[Leaf]
    state: Any
    decision: Decision

    def take(self, rows: Rows) -> ActResult:
        """Select rows of the columns, the actions and the decision; `state` of the result is None."""
        policy_columns, dist = self.decision.get("policy"), self.decision.get("dist")
        decision = {
            "act": self.decision["act"][rows],
            "policy": Batch(policy_columns)[rows] if policy_columns else None,
            "dist": None if dist is None else get_sliced_dist(dist, rows),
            "state": policy_state.take(self.decision.get("state"), rows),
        }
        columns = {name: column[rows] for name, column in self.columns.items()}
        return ActResult(columns, [leaf[rows] for leaf in self.actions], None, decision)


class Actor:
    """Policy with exploration noise and an action map; collectors call an actor once per step for all environments.

    - `map_action`: replaces the policy's own `map_action`. Random actions are mapped only by `"scale"`.
    - `hidden_state`: name of an additional column for the state after each step, which Tianshou's collector stores;
      None for no such column. The state before each step is always stored, in `state_in_0`, `state_in_1`, ...

    Attributes of the actor:
    - `action_unit`, `random_unit`: units of the policy's recorded actions, and of recorded random actions.
    - `unmaps_random`: whether random actions are converted to the policy's unit before they are recorded (see `unmap`).

    Raises PolicySpecError if the type of the policy is not supported, exploration noise is enabled but the policy has
    no exploration noise, or the action space does not support `map_action`.
    """

    def __init__(
        self,
        policy: Any,
        observations: SpaceLayout,
        actions: SpaceLayout,
        action_space: Any,
        *,
        exploration_noise: bool | Callable[[Any, Batch], Any] = False,
        map_action: action_map.ActionMap | None = None,
        seed: np.random.SeedSequence | None = None,
        hidden_state: str | None = None,
    ) -> None:
        policy_seed, draw_seed = (seed or np.random.SeedSequence()).spawn(2)
        self.policy = as_policy(policy, action_space, seed=policy_seed)
        policy = unwrap_policy(policy)
        self._observations, self._layout = observations, actions
        self._obs_names = column_names(names.OBS, observations)
        self._plain = observations.plain and actions.plain
        self._action_names = column_names(names.ACTIONS, actions)
        self._shapes = [space.shape if actions.is_numeric(space) else None for space in actions.spaces]
        self._checked_layout: Any = None
        """Row count, shape and dtype of the last valid plain actions; equal ones are not checked again."""
        check_noise(exploration_noise)
        action_map.check_action_map(map_action)
        self._noise = _noise_function(policy, exploration_noise)
        self.takes_batch = self.policy.takes_batch or self._noise is not None
        self._map: Callable[[Any], Any] | None = getattr(policy, "map_action", None)
        self._unmap: Callable[[Any], Any] | None = getattr(policy, "map_action_inverse", None)
        if map_action is not None:
            self._map, self._unmap = action_map.make_action_map(map_action, action_space), None
        self._random = RandomPolicy(action_map.space_to_draw(map_action, action_space), seed=draw_seed)
        self._map_random = self._map if map_action == "scale" else None
        self._hidden_state = hidden_state
        unit = action_map.unit_of_actions(policy, map_action, action_space)
        is_mapped = self._unmap is not None or self._map_random is not None
        self.unmaps_random = self._unmap is not None
        self.action_unit, self.random_unit = unit, unit if is_mapped else action_map.unit_of_space(action_space)
        if self._unmap is not None and unit is not None and unit.mapping not in (None, "function"):
            # Mapping the recorded action must reproduce the environment's action exactly.
            self._map_random = unit.to_environment

    def act(self, obs: Sequence[Leaf], info: Any, state: Any, rows: int) -> ActResult:
        """Call the policy on observations.

        - `obs`: leaves of the observations, each of shape (rows, ...).
        - `info`: infos of the environments; ignored unless `takes_batch`.
        - `state`: recurrent state that the policy returned for the previous step; None in the first call.
        - `rows`: number of environments.

        Raises PolicySpecError if the number of actions or of state rows is not `rows`, or the structure of the actions
        differs from the structure of the action space.
        """
        plain = self._plain
        policy_input: Any = obs[0] if plain else self._observations.batch(obs)
        if self.takes_batch:
            policy_input = node(Batch, {"obs": policy_input, "info": info})
        if self._noise is None:
            decision = self.policy.decide(policy_input, state)
            act = decision["act"]
        else:
            decision = self.policy(policy_input, state)
            act = decision["act"] = to_numpy(self._noise(decision["act"], policy_input))
        leaves = [act] if plain else self._layout.flatten(act)
        layout = (rows, act.shape, act.dtype) if plain else None
        if layout is None or layout != self._checked_layout:
            self._check_rows(leaves, rows)
            self._check_actions(leaves, mapped=self._map is None)
            self._checked_layout = layout
        # Copied because the policy may reuse its array for the next actions.
        columns = {names.OBS: obs[0], names.ACTIONS: act.copy()} if plain else self._columns(obs, leaves)
        after = None
        if len(decision) > 1:
            after = decision.get("state")
            if after is not None:
                policy_state.check(after, rows)
            for name, column in self._recorded_columns(decision, state, after):
                if not isinstance(column, np.ndarray) or not column.ndim or len(column) != rows:
                    raise _row_count_error(name, column, rows)
                if name in _RECORDED and column.dtype.kind not in _NUMBERS:
                    kind = _kind_of(column)
                    raise PolicySpecError(f"column {name!r} must contain numbers, got {kind} from the policy")
                columns[name] = column.copy()
        if self._map is not None:
            leaves = self._layout.flatten(to_numpy(self._map(act)))
            self._check_actions(leaves, mapped=True)
        return _new_tuple(ActResult, (columns, leaves, after, decision))

    def draw(self, obs: Sequence[Leaf], rows: int) -> ActResult:
        """Sample random actions."""
        recorded, actions = self.unmap(self._random.sample(rows))
        leaves = self._layout.flatten(actions)
        recorded_leaves = leaves if actions is recorded else self._layout.flatten(recorded)
        return ActResult(self._columns(obs, recorded_leaves), leaves, None, {"act": recorded})

    def unmap(self, recorded: Any) -> tuple[Any, Any]:
        """Convert actions sampled from the space to the actions to record and the actions for the environments."""
        actions = recorded
        if self._unmap is not None:
            recorded = to_numpy(self._unmap(recorded))
        return recorded, actions if self._map_random is None else self._map_random(recorded)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random generators, without the weights of the policy."""
        policy = self.policy.policy
        policy_state_dict = policy.state_dict() if isinstance(policy, RandomPolicy | RandomByEnvironment) else None
        return {"random": self._random.state_dict(), "policy": policy_state_dict}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the random generators from `state_dict` of an actor with the same spaces."""
        self._random.load_state_dict(state["random"])
        policy = self.policy.policy
        if isinstance(policy, RandomPolicy | RandomByEnvironment) and state["policy"] is not None:
            policy.load_state_dict(state["policy"])

    def _check_rows(self, leaves: Sequence[Leaf], rows: int) -> None:
        for leaf in leaves:
            if not leaf.ndim or len(leaf) != rows:
                raise PolicySpecError(
                    f"a policy must return an action for each of {rows} environments, got actions of shape {leaf.shape}"
                )

    def _check_actions(self, leaves: Sequence[Leaf], *, mapped: bool) -> None:
        for leaf, shape, name in zip(leaves, self._shapes, self._action_names, strict=True):
            if shape is None:
                continue
            if leaf.dtype.kind not in "biuf":
                raise PolicySpecError(f"column {name!r} must contain numbers, got {_kind_of(leaf)} from the policy")
            if mapped and leaf.shape[1:] != shape:
                raise PolicySpecError(
                    f"column {name!r} must have rows of shape {shape}, like the action space, got {leaf.shape[1:]}"
                )

    def _columns(self, obs: Sequence[Leaf], actions: Sequence[Leaf]) -> Columns:
        columns = dict(zip(self._obs_names, obs, strict=True))
        for name, leaf in zip(self._action_names, actions, strict=True):
            columns[name] = leaf.copy()
        return columns

    def _recorded_columns(self, decision: Decision, before: Any, after: Any) -> Iterator[tuple[str, Leaf]]:
        policy_columns = decision.get("policy")
        if policy_columns is not None:
            values = values_of(policy_columns)
            yield from _leaves_of("policy", vars(policy_columns) if values is None else values)
        for name in _RECORDED:
            if name in decision:
                yield name, to_numpy(decision[name])
        if after is None:
            return
        yield from policy_state.columns_of(policy_state.zeros_like(after) if before is None else before)
        if self._hidden_state is not None:
            arrays = policy_state.as_arrays(after)
            if KINDS[type(arrays)] == NODE:
                yield from _leaves_of(self._hidden_state, arrays.__dict__)
            else:
                yield self._hidden_state, arrays


def _row_count_error(name: str, column: Any, rows: int) -> PolicySpecError:
    length = len(column) if np.ndim(column) else f"a single {type(column).__name__}"
    return PolicySpecError(f"column {name!r} must have {rows} rows, one per observation of the policy, got {length}")


def _kind_of(leaf: Leaf) -> str:
    return "Python objects" if leaf.dtype.hasobject else str(leaf.dtype)


def _leaves_of(path: str, values: Any) -> Iterator[tuple[str, Leaf]]:
    for name, value in values.items():
        nested = values_of(value)
        if nested is None:
            yield f"{path}.{name}", to_numpy(value)
        else:
            yield from _leaves_of(f"{path}.{name}", nested)


def _noise_function(
    policy: Any, exploration_noise: bool | Callable[[Any, Batch], Any]
) -> Callable[[Any, Batch], Any] | None:
    if callable(exploration_noise):
        return exploration_noise
    if not exploration_noise:
        return None
    noise: Callable[[Any, Batch], Any] | None = getattr(policy, "add_exploration_noise", None)
    if noise is None:
        raise PolicySpecError(
            "a policy must have a method add_exploration_noise for exploration_noise=True, got a "
            f"{type(policy).__name__}; pass a function of actions and batch as exploration_noise"
        )
    return noise


def check_noise(exploration_noise: Any) -> None:
    """Validate the value of `exploration_noise`; functions are not inspected."""
    if not callable(exploration_noise) and not isinstance(exploration_noise, bool | np.bool_):
        raise PolicySpecError(f"exploration_noise must be True, False or a function, got {exploration_noise!r}")

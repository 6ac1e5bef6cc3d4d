"""Actor: a policy with exploration noise and an action map, asked once for many environments."""

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
from samplebatch.policy import state as policy_state
from samplebatch.policy.action_map import (
    ActionMap,
    check_action_map,
    make_action_map,
    space_to_draw,
    unit_of_actions,
    unit_of_space,
)
from samplebatch.policy.as_policy import Decision, as_policy, own_policy
from samplebatch.policy.random import RandomByEnvironment, RandomPolicy

_RECORDED = (names.ACTION_LOGP, names.ACTION_PROB, names.ACTION_DIST_INPUTS, names.VF_PREDS)
"""Columns of a decision that are kept beside actions, state and `policy`."""
_NUMBERS = "biufc"
_new_tuple = tuple.__new__
"""Makes a named tuple without a call of Python code."""


class ActResult(NamedTuple):
    """Actions of n environments, and the columns of the decision.

    Attributes
    ----------
    columns
        The columns that are known before the step: observations, actions, and all that the policy wants kept.
    actions
        The leaves of the actions as the environments take them.
    state
        The recurrent state for the next step; None for none.
    decision
        All that the policy said.
    """

    columns: Columns
    actions: Sequence[Leaf]
    state: Any
    decision: Decision

    def take(self, rows: Rows) -> ActResult:
        """Take some rows; the state is left out."""
        said, dist = self.decision.get("policy"), self.decision.get("dist")
        decision = {
            "act": self.decision["act"][rows],
            "policy": Batch(said)[rows] if said else None,
            "dist": None if dist is None else get_sliced_dist(dist, rows),
            "state": policy_state.take(self.decision.get("state"), rows),
        }
        columns = {name: column[rows] for name, column in self.columns.items()}
        return ActResult(columns, [leaf[rows] for leaf in self.actions], None, decision)


class Actor:
    """A policy with exploration noise and an action map; collectors ask it once for all environments.

    Parameters
    ----------
    map_action
        Takes the place of the policy's `map_action`. Random actions are only mapped where that means scaling.
    hidden_state
        The column that also stores the state after each step, as Tianshou's collector does; None for none. The state
        before the step is stored in any case, as `state_in_0` and so on.

    Attributes
    ----------
    action_unit, drawn_unit
        The units of the actions that are recorded: of those of the policy, and of random ones.
    maps_drawn_back
        Whether random actions are recorded as the policy would have given them (see `unmap`).

    Raises
    ------
    PolicySpecError
        If the policy cannot be asked, has no noise to add, or the actions cannot be mapped so.
    """

    def __init__(
        self,
        policy: Any,
        observations: SpaceLayout,
        actions: SpaceLayout,
        action_space: Any,
        *,
        exploration_noise: bool | Callable[[Any, Batch], Any] = False,
        map_action: ActionMap | None = None,
        seed: np.random.SeedSequence | None = None,
        hidden_state: str | None = None,
    ) -> None:
        policy_seed, draw_seed = (seed or np.random.SeedSequence()).spawn(2)
        self.policy = as_policy(policy, action_space, seed=policy_seed)
        policy = own_policy(policy)
        self._observations, self._layout = observations, actions
        self._obs_names = column_names(names.OBS, observations)
        self._plain = observations.plain and actions.plain
        self._action_names = column_names(names.ACTIONS, actions)
        self._shapes = [space.shape if actions.is_numeric(space) else None for space in actions.spaces]
        self._checked: Any = None
        """Rows, shape and dtype of actions that were found right; plain ones that are alike need no look."""
        check_noise(exploration_noise)
        check_action_map(map_action)
        self._noise = _noise_of(policy, exploration_noise)
        self.takes_batch = self.policy.takes_batch or self._noise is not None
        self._map: Callable[[Any], Any] | None = getattr(policy, "map_action", None)
        self._unmap: Callable[[Any], Any] | None = getattr(policy, "map_action_inverse", None)
        if map_action is not None:
            self._map, self._unmap = make_action_map(map_action, action_space), None
        self._random = RandomPolicy(space_to_draw(map_action, action_space), seed=draw_seed)
        self._map_drawn = self._map if map_action == "scale" else None
        self._hidden_state = hidden_state
        unit = unit_of_actions(policy, map_action, action_space)
        is_mapped = self._unmap is not None or self._map_drawn is not None
        self.maps_drawn_back = self._unmap is not None
        self.action_unit, self.drawn_unit = unit, unit if is_mapped else unit_of_space(action_space)
        if self._unmap is not None and unit is not None and unit.mapping not in (None, "function"):
            # What is recorded leads to the action that the environment got, to the last bit.
            self._map_drawn = unit.to_environment

    def act(self, obs: Sequence[Leaf], info: Any, state: Any, rows: int) -> ActResult:
        """Ask the policy for actions.

        Parameters
        ----------
        obs
            The leaves of the observations, each of shape (rows, ...).
        info
            The environments' infos; not looked at unless `takes_batch`.
        state
            The recurrent state that the policy returned last; None for none.
        rows
            How many environments there are to decide for.

        Raises
        ------
        PolicySpecError
            If there are not as many actions as environments, or rows in the state, or the actions have not the parts
            of the action space.
        """
        plain = self._plain
        given: Any = obs[0] if plain else self._observations.batch(obs)
        if self.takes_batch:
            given = node(Batch, {"obs": given, "info": info})
        if self._noise is None:
            decision = self.policy.decide(given, state)
            act = decision["act"]
        else:
            decision = self.policy(given, state)
            act = decision["act"] = to_numpy(self._noise(decision["act"], given))
        leaves = [act] if plain else self._layout.flatten(act)
        form = (rows, act.shape, act.dtype) if plain else None
        if form is None or form != self._checked:
            self._check_rows(leaves, rows)
            self._check(leaves, mapped=self._map is None)
            self._checked = form
        # The policy may write its next actions where these are.
        columns = {names.OBS: obs[0], names.ACTIONS: act.copy()} if plain else self._columns(obs, leaves)
        after = None
        if len(decision) > 1:
            after = decision.get("state")
            if after is not None:
                policy_state.check(after, rows)
            for name, kept in self._recorded_columns(decision, state, after):
                if not isinstance(kept, np.ndarray) or not kept.ndim or len(kept) != rows:
                    raise _wrong_rows(name, kept, rows)
                if name in _RECORDED and kept.dtype.kind not in _NUMBERS:
                    raise PolicySpecError(f"column {name!r} must hold numbers, got {_kind_of(kept)} from the policy")
                columns[name] = kept.copy()
        if self._map is not None:
            leaves = self._layout.flatten(to_numpy(self._map(act)))
            self._check(leaves, mapped=True)
        return _new_tuple(ActResult, (columns, leaves, after, decision))

    def draw(self, obs: Sequence[Leaf], rows: int) -> ActResult:
        """Draw actions at random."""
        drawn, actions = self.unmap(self._random.sample(rows))
        leaves = self._layout.flatten(actions)
        kept = leaves if actions is drawn else self._layout.flatten(drawn)
        return ActResult(self._columns(obs, kept), leaves, None, {"act": drawn})

    def unmap(self, drawn: Any) -> tuple[Any, Any]:
        """Return actions drawn from the space as they are recorded, and as environments take them."""
        actions = drawn
        if self._unmap is not None:
            drawn = to_numpy(self._unmap(drawn))
        return drawn, actions if self._map_drawn is None else self._map_drawn(drawn)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators of random actions. A policy has a state of its own, which is not in it."""
        own = self.policy.policy
        drawn = own.state_dict() if isinstance(own, RandomPolicy | RandomByEnvironment) else None
        return {"random": self._random.state_dict(), "policy": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the draws of an actor of the same spaces where its `state_dict` was."""
        self._random.load_state_dict(state["random"])
        own = self.policy.policy
        if isinstance(own, RandomPolicy | RandomByEnvironment) and state["policy"] is not None:
            own.load_state_dict(state["policy"])

    def _check_rows(self, leaves: Sequence[Leaf], rows: int) -> None:
        for leaf in leaves:
            if not leaf.ndim or len(leaf) != rows:
                raise PolicySpecError(
                    f"a policy must return an action for each of {rows} environments, got actions of shape {leaf.shape}"
                )

    def _check(self, leaves: Sequence[Leaf], *, mapped: bool) -> None:
        for leaf, shape, name in zip(leaves, self._shapes, self._action_names, strict=True):
            if shape is None:
                continue
            if leaf.dtype.kind not in "biuf":
                raise PolicySpecError(f"column {name!r} must hold numbers, got {_kind_of(leaf)} from the policy")
            if mapped and leaf.shape[1:] != shape:
                raise PolicySpecError(
                    f"column {name!r} must have rows of shape {shape}, as the action space has, got {leaf.shape[1:]}"
                )

    def _columns(self, obs: Sequence[Leaf], actions: Sequence[Leaf]) -> Columns:
        columns = dict(zip(self._obs_names, obs, strict=True))
        for name, leaf in zip(self._action_names, actions, strict=True):
            columns[name] = leaf.copy()
        return columns

    def _recorded_columns(self, decision: Decision, before: Any, after: Any) -> Iterator[tuple[str, Leaf]]:
        said = decision.get("policy")
        if said is not None:
            named = values_of(said)
            yield from _leaves_of("policy", vars(said) if named is None else named)
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


def _wrong_rows(name: str, kept: Any, rows: int) -> PolicySpecError:
    found = len(kept) if np.ndim(kept) else f"a single {type(kept).__name__}"
    return PolicySpecError(
        f"column {name!r} must have {rows} rows, one for each environment that the policy was asked about, got {found}"
    )


def _kind_of(leaf: Leaf) -> str:
    return "Python objects" if leaf.dtype.hasobject else str(leaf.dtype)


def _leaves_of(path: str, values: Any) -> Iterator[tuple[str, Leaf]]:
    for name, value in values.items():
        nested = values_of(value)
        if nested is None:
            yield f"{path}.{name}", to_numpy(value)
        else:
            yield from _leaves_of(f"{path}.{name}", nested)


def _noise_of(policy: Any, wanted: bool | Callable[[Any, Batch], Any]) -> Callable[[Any, Batch], Any] | None:
    if callable(wanted):
        return wanted
    if not wanted:
        return None
    noise: Callable[[Any, Batch], Any] | None = getattr(policy, "add_exploration_noise", None)
    if noise is None:
        raise PolicySpecError(
            f"a policy must have a method add_exploration_noise to explore, a {type(policy).__name__} has none; "
            "give a function of actions and batch as exploration_noise"
        )
    return noise


def check_noise(wanted: Any) -> None:
    """Check an `exploration_noise`; functions pass."""
    if not callable(wanted) and not isinstance(wanted, bool | np.bool_):
        raise PolicySpecError(f"exploration_noise must be True, False or a function, got {wanted!r}")

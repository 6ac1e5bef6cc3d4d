"""Policies of other libraries, each as a function of observations: Stable-Baselines3, RLlib and CleanRL.

They are recognised by their methods; no library is imported. Tianshou's policies are functions of a batch and need no
wrapper.

=================================  =====================================================================================
methods                            what is asked
=================================  =====================================================================================
`predict`, `get_parameters` or     a model or policy of Stable-Baselines3: its policy, on tensors, where that says how
`obs_to_tensor`                    likely an action was and what it is worth; `predict` otherwise
`forward_exploration`              an `RLModule`: `forward_exploration` or `forward_inference`, and its distributions
`compute_actions`                  an RLlib `Policy` of the older API
`get_action_and_value`,            an agent of CleanRL's scripts, with or without a recurrent state
`get_action`
=================================  =====================================================================================
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.nested.functions import to_numpy, to_torch
from samplebatch.batch.nested.node import KINDS, NODE
from samplebatch.errors import PolicySpecError

_RLLIB_COLUMNS = (names.ACTION_DIST_INPUTS, names.ACTION_LOGP, names.VF_PREDS)


def is_module(policy: Any) -> bool:
    """Tell whether a policy is a torch module; torch need not be loaded."""
    torch = sys.modules.get("torch.nn")
    return torch is not None and isinstance(policy, torch.Module)


class PeerPolicy(ABC):
    """A policy of another library, asked by a `PolicyAdapter` as a function of observations.

    Attributes
    ----------
    policy
        The other library's object.
    map_action, map_action_inverse
        How recorded actions become those of environments, and back; None where they are the same.
    action_unit
        The unit of recorded actions, where they are mapped.
    """

    map_action: Any = None
    map_action_inverse: Any = None
    action_unit: ActionUnit | None = None

    def __init__(self, policy: Any, *, deterministic: bool = False) -> None:
        self.policy = policy
        self._deterministic = deterministic

    @abstractmethod
    def __call__(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """Ask for the actions of every row of observations."""

    def load_state_dict(self, state: Any) -> None:
        """Load weights."""
        self.policy.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        found: dict[str, Any] = self.policy.state_dict()
        return found


class StableBaselinesPolicy(PeerPolicy):
    """A model or a policy of Stable-Baselines3.

    Actions are recorded as its buffers hold them: as an on-policy policy drew them, and within -1 and 1 where the
    policy squashes its output. Environments get them clipped or scaled, as Stable-Baselines3 does it.
    """

    def __init__(self, policy: Any, *, deterministic: bool = False) -> None:
        super().__init__(policy, deterministic=deterministic)
        self._module = module = getattr(policy, "policy", policy)
        self._estimates = hasattr(module, "predict_values") and not hasattr(module, "lstm_actor")
        self._squashes = bool(module.squash_output)
        space = module.action_space
        if self._squashes:
            self.map_action, self.map_action_inverse = module.unscale_action, module.scale_action
            self.action_unit = ActionUnit("scale", space.low, space.high)
        elif self._estimates and hasattr(space, "low"):
            self.map_action = lambda act: np.clip(act, space.low, space.high)
            self.action_unit = ActionUnit("clip", space.low, space.high)

    def __call__(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """See `PeerPolicy`."""
        obs = _as_dict(obs)
        if self._estimates:
            self._module.set_training_mode(False)
            tensors, _ = self._module.obs_to_tensor(obs)
            with sys.modules["torch"].no_grad():
                act, values, logp = self._module(tensors, deterministic=self._deterministic)
            return {"act": act, names.VF_PREDS: values.reshape(len(values)), names.ACTION_LOGP: logp}
        before = None if state is None else tuple(np.swapaxes(part, 0, 1) for part in state)
        act, after = self.policy.predict(obs, state=before, deterministic=self._deterministic)
        said = {"act": self._module.scale_action(act) if self._squashes else act}
        return said if after is None else {**said, "state": tuple(np.swapaxes(part, 0, 1) for part in after)}

    def add_exploration_noise(self, act: Any, batch: Any) -> Any:
        """Add the noise that the model was made with, within -1 and 1."""
        noise = getattr(self.policy, "action_noise", None)
        return act if noise is None else np.clip(act + noise(), -1.0, 1.0).astype(act.dtype)

    def load_state_dict(self, state: Any) -> None:
        """Load weights."""
        self._module.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        found: dict[str, Any] = self._module.state_dict()
        return found


class RLModulePolicy(PeerPolicy):
    """A torch `RLModule` of RLlib, with or without a state."""

    def __init__(self, policy: Any, *, deterministic: bool = False) -> None:
        super().__init__(policy, deterministic=deterministic)
        self._stateful = bool(policy.is_stateful())

    def __call__(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """See `PeerPolicy`."""
        module = self.policy
        device = next((parameter.device for parameter in module.parameters()), "cpu")
        tensors = to_torch(obs, device=device)
        asked: dict[str, Any] = {names.OBS: _as_dict(tensors)}
        if self._stateful:
            # A row is a sequence of one step.
            asked[names.OBS] = _map_tree(asked[names.OBS], lambda leaf: leaf[:, None])
            rows = len(_first_leaf(tensors))
            asked["state_in"] = _repeat(module.get_initial_state(), rows, device) if state is None else state
        with sys.modules["torch"].no_grad():
            said = (module.forward_inference if self._deterministic else module.forward_exploration)(asked)
            known = {name: said[name] for name in (names.ACTIONS, *_RLLIB_COLUMNS) if name in said}
            if self._stateful:
                known = {name: _map_tree(value, lambda leaf: leaf[:, 0]) for name, value in known.items()}
            decided = self._decide(known)
        return decided if "state_out" not in said else {**decided, "state": said["state_out"]}

    def _decide(self, known: dict[str, Any]) -> dict[str, Any]:
        """Draw actions where the module returned the inputs of a distribution alone."""
        if names.ACTIONS in known:
            return {"act": known.pop(names.ACTIONS), **known}
        module, inputs = self.policy, known[names.ACTION_DIST_INPUTS]
        if self._deterministic:
            distribution = module.get_inference_action_dist_cls().from_logits(inputs).to_deterministic()
            return {"act": distribution.sample(), **known}
        distribution = module.get_exploration_action_dist_cls().from_logits(inputs)
        actions = distribution.sample()
        return {"act": actions, names.ACTION_LOGP: distribution.logp(actions), **known}


class RLlibPolicy(PeerPolicy):
    """A `Policy` of RLlib's older API."""

    def __call__(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """See `PeerPolicy`."""
        policy = self.policy
        before = None if state is None else list(state)
        if before is None and policy.is_recurrent():
            rows = len(_first_leaf(obs))
            before = [np.repeat(to_numpy(part)[None], rows, 0) for part in policy.get_initial_state()]
        act, after, said = policy.compute_actions(_as_dict(obs), before, explore=not self._deterministic)
        known = {name: said[name] for name in _RLLIB_COLUMNS if name in said}
        return {"act": act, **known, "state": list(after)} if after else {"act": act, **known}

    def load_state_dict(self, state: Any) -> None:
        """Load weights."""
        self.policy.set_weights(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        found: dict[str, Any] = self.policy.get_weights()
        return found


class CleanRLAgent(PeerPolicy):
    """An agent of CleanRL's scripts: `get_action_and_value`, or `get_action` of actors that have no value function.

    A recurrent agent has its states in rows by layer; those of collectors are in rows by environment. No episode ever
    begins for it (its `done` is 0), as collectors set states to zero where one does.
    """

    def __init__(self, policy: Any, *, deterministic: bool = False) -> None:
        if deterministic:
            raise PolicySpecError(
                f"an agent asked by get_action_and_value or get_action draws its actions, a {type(policy).__name__} "
                "cannot be asked for the best; give a function of tensors that returns them"
            )
        super().__init__(policy)
        self._with_value = hasattr(policy, "get_action_and_value")
        self._ask = policy.get_action_and_value if self._with_value else policy.get_action
        recurrent = "lstm_state" in inspect.signature(self._ask).parameters
        self._lstm: Any = policy.lstm if recurrent else None

    def __call__(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """See `PeerPolicy`."""
        torch = sys.modules["torch"]
        weight = next(iter(self.policy.parameters()), None)
        given = to_torch(obs, device="cpu" if weight is None else weight.device)
        if weight is not None and given.is_floating_point():
            given = given.to(weight.dtype)
        with torch.no_grad():
            if self._lstm is not None:
                return self._ask_recurrent(given, state)
            said = self._ask(given)
        if not isinstance(said, tuple):
            return {"act": said}
        decided = {"act": said[0], names.ACTION_LOGP: said[1].reshape(len(given))}
        return {**decided, names.VF_PREDS: said[3].reshape(len(given))} if self._with_value else decided

    def _ask_recurrent(self, given: Any, state: Any) -> dict[str, Any]:
        rows, lstm = len(given), self._lstm
        if state is None:
            zeros = given.new_zeros((lstm.num_layers, rows, lstm.hidden_size), dtype=lstm.weight_hh_l0.dtype)
            before = (zeros, zeros)
        else:
            before = tuple(part.transpose(0, 1).contiguous() for part in state)
        act, logp, _, values, after = self._ask(given, before, given.new_zeros(rows, dtype=before[0].dtype))
        return {
            "act": act,
            names.ACTION_LOGP: logp.reshape(rows),
            names.VF_PREDS: values.reshape(rows),
            "state": tuple(part.transpose(0, 1) for part in after),
        }


def policy_of(policy: Any) -> Any:
    """Return the policy of an algorithm: of a torch module that has a `policy` and cannot be called itself."""
    if is_module(policy) and not _has_forward(policy) and callable(getattr(policy, "policy", None)):
        return policy.policy
    return policy


def wrap_peer(policy: Any, *, deterministic: bool = False) -> Any:
    """Wrap a policy of another library as a function of observations; return any other policy as it is."""
    if isinstance(policy, PeerPolicy):
        return type(policy)(policy.policy, deterministic=True) if deterministic else policy
    kind = None if isinstance(policy, type) else _kind_of(policy)
    if kind is not None:
        return kind(policy, deterministic=deterministic)
    if deterministic:
        raise PolicySpecError(
            "deterministic must be left out unless the policy is one of Stable-Baselines3 or RLlib, got a "
            f"{type(policy).__name__}, which decides by itself"
        )
    return policy


def _kind_of(policy: Any) -> type[PeerPolicy] | None:

    def has(*methods: str) -> bool:
        return all(hasattr(policy, method) for method in methods)

    if has("predict", "get_parameters") or has("predict", "obs_to_tensor"):
        return StableBaselinesPolicy
    if has("forward_exploration", "forward_inference"):
        return RLModulePolicy
    if has("compute_actions", "is_recurrent"):
        return RLlibPolicy
    if is_module(policy) and (has("get_action_and_value") or (has("get_action") and not _names_its_input(policy))):
        return CleanRLAgent
    return None


def _has_forward(module: Any) -> bool:
    return type(module).forward is not sys.modules["torch.nn"].Module.forward


def _names_its_input(module: Any) -> bool:
    return _has_forward(module) and next(iter(inspect.signature(module.forward).parameters), "") in ("obs", "batch")


def _as_dict(obs: Any) -> Any:
    if KINDS[type(obs)] != NODE:
        return obs
    return {name: _as_dict(value) for name, value in obs.__dict__.items()}


def _first_leaf(tree: Any) -> Any:
    while KINDS[type(tree)] == NODE or isinstance(tree, Mapping):
        tree = next(iter((tree if isinstance(tree, Mapping) else tree.__dict__).values()))
    return tree


def _map_tree(tree: Any, function: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _map_tree(value, function) for name, value in tree.items()}
    return function(tree)


def _repeat(state: Any, rows: int, device: Any) -> Any:
    torch = sys.modules["torch"]
    return _map_tree(state, lambda leaf: torch.as_tensor(leaf, device=device).unsqueeze(0).repeat_interleave(rows, 0))

"""Adapters that convert policies of Stable-Baselines3, RLlib and CleanRL to functions of observations.

Policies are recognised by their methods; no library is imported. Tianshou's policies are functions of a batch and need
no adapter.

=================================  =====================================================================================
methods                            policy and call
=================================  =====================================================================================
`predict`, `get_parameters` or     Stable-Baselines3 model or policy: its policy on tensors if that returns log-
`obs_to_tensor`                    probabilities and values; else `predict`
`forward_exploration`              RLlib `RLModule`: `forward_exploration` or `forward_inference`, and its distributions
`compute_actions`                  RLlib `Policy` of the older API
`get_action_and_value`,            agent of CleanRL's scripts, with or without a recurrent state
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
    """Whether a policy is a torch module; does not import torch."""
    torch = sys.modules.get("torch.nn")
    return torch is not None and isinstance(policy, torch.Module)


class PeerPolicy(ABC):
    """Adapter from a policy of another library to a function of observations.

    - `policy`: object of the other library.
    - `map_action`, `map_action_inverse`: conversion of recorded actions to environment actions and its inverse; None if
      recorded actions equal environment actions.
    - `action_unit`: unit of recorded actions; None if they are not mapped.
    """

    map_action: Any = None
    map_action_inverse: Any = None
    action_unit: ActionUnit | None = None

    def __init__(self, policy: Any, *, deterministic: bool = False) -> None:
        self.policy = policy
        self._deterministic = deterministic

    @abstractmethod
    def __call__(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """Return the decision for all rows of observations."""

    def load_state_dict(self, state: Any) -> None:
        """Load weights."""
        self.policy.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        weights: dict[str, Any] = self.policy.state_dict()
        return weights


class StableBaselinesPolicy(PeerPolicy):
    """Model or policy of Stable-Baselines3.

    Recorded actions are in the same unit as the actions in buffers of Stable-Baselines3: unclipped for on-policy
    algorithms, and within [-1, 1] for policies with squashed output. As in Stable-Baselines3, actions are clipped or
    scaled for the environment.
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
        state_before = None if state is None else tuple(np.swapaxes(part, 0, 1) for part in state)
        act, state_after = self.policy.predict(obs, state=state_before, deterministic=self._deterministic)
        decision = {"act": self._module.scale_action(act) if self._squashes else act}
        return (
            decision
            if state_after is None
            else {**decision, "state": tuple(np.swapaxes(part, 0, 1) for part in state_after)}
        )

    def add_exploration_noise(self, act: Any, batch: Any) -> Any:
        """Add the model's `action_noise` to actions, and clip the actions to [-1, 1]."""
        noise = getattr(self.policy, "action_noise", None)
        return act if noise is None else np.clip(act + noise(), -1.0, 1.0).astype(act.dtype)

    def load_state_dict(self, state: Any) -> None:
        """Load weights."""
        self._module.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        weights: dict[str, Any] = self._module.state_dict()
        return weights


class RLModulePolicy(PeerPolicy):
    """Torch `RLModule` of RLlib, with or without a recurrent state."""

    def __init__(self, policy: Any, *, deterministic: bool = False) -> None:
        super().__init__(policy, deterministic=deterministic)
        self._stateful = bool(policy.is_stateful())

    def __call__(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """See `PeerPolicy`."""
        module = self.policy
        device = next((parameter.device for parameter in module.parameters()), "cpu")
        tensors = to_torch(obs, device=device)
        module_input: dict[str, Any] = {names.OBS: _as_dict(tensors)}
        if self._stateful:
            # Each row becomes a sequence of one step.
            module_input[names.OBS] = _map_tree(module_input[names.OBS], lambda leaf: leaf[:, None])
            rows = len(_first_leaf(tensors))
            module_input["state_in"] = _repeat(module.get_initial_state(), rows, device) if state is None else state
        with sys.modules["torch"].no_grad():
            output = (module.forward_inference if self._deterministic else module.forward_exploration)(module_input)
            columns = {name: output[name] for name in (names.ACTIONS, *_RLLIB_COLUMNS) if name in output}
            if self._stateful:
                columns = {name: _map_tree(value, lambda leaf: leaf[:, 0]) for name, value in columns.items()}
            decision = self._decision_of(columns)
        return decision if "state_out" not in output else {**decision, "state": output["state_out"]}

    def _decision_of(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the module's actions, or sample actions if the module returned only the inputs of a distribution."""
        if names.ACTIONS in columns:
            return {"act": columns.pop(names.ACTIONS), **columns}
        module, inputs = self.policy, columns[names.ACTION_DIST_INPUTS]
        if self._deterministic:
            distribution = module.get_inference_action_dist_cls().from_logits(inputs).to_deterministic()
            return {"act": distribution.sample(), **columns}
        distribution = module.get_exploration_action_dist_cls().from_logits(inputs)
        actions = distribution.sample()
        return {"act": actions, names.ACTION_LOGP: distribution.logp(actions), **columns}


class RLlibPolicy(PeerPolicy):
    """A `Policy` of RLlib's older API."""

    def __call__(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """See `PeerPolicy`."""
        policy = self.policy
        state_before = None if state is None else list(state)
        if state_before is None and policy.is_recurrent():
            rows = len(_first_leaf(obs))
            state_before = [np.repeat(to_numpy(part)[None], rows, 0) for part in policy.get_initial_state()]
        act, state_after, extra_outputs = policy.compute_actions(
            _as_dict(obs), state_before, explore=not self._deterministic
        )
        columns = {name: extra_outputs[name] for name in _RLLIB_COLUMNS if name in extra_outputs}
        return {"act": act, **columns, "state": list(state_after)} if state_after else {"act": act, **columns}

    def load_state_dict(self, state: Any) -> None:
        """Load weights."""
        self.policy.set_weights(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        weights: dict[str, Any] = self.policy.get_weights()
        return weights


class CleanRLAgent(PeerPolicy):
    """An agent of CleanRL's scripts: `get_action_and_value`, or `get_action` of actors without a value function.

    The first axis of a recurrent agent's states is the layer; the first axis of a collector's states is the
    environment. The agent's `done` is always 0, because collectors reset the states at the start of episodes.
    """

    def __init__(self, policy: Any, *, deterministic: bool = False) -> None:
        if deterministic:
            raise PolicySpecError(
                "deterministic must be False for an agent that samples its actions in get_action, got a "
                f"{type(policy).__name__}; pass a function of tensors that returns the best actions"
            )
        super().__init__(policy)
        self._with_value = hasattr(policy, "get_action_and_value")
        self._call = policy.get_action_and_value if self._with_value else policy.get_action
        recurrent = "lstm_state" in inspect.signature(self._call).parameters
        self._lstm: Any = policy.lstm if recurrent else None

    def __call__(self, obs: Any, state: Any = None) -> dict[str, Any]:
        """See `PeerPolicy`."""
        torch = sys.modules["torch"]
        weight = next(iter(self.policy.parameters()), None)
        tensor = to_torch(obs, device="cpu" if weight is None else weight.device)
        if weight is not None and tensor.is_floating_point():
            tensor = tensor.to(weight.dtype)
        with torch.no_grad():
            if self._lstm is not None:
                return self._call_recurrent(tensor, state)
            output = self._call(tensor)
        if not isinstance(output, tuple):
            return {"act": output}
        decision = {"act": output[0], names.ACTION_LOGP: output[1].reshape(len(tensor))}
        return {**decision, names.VF_PREDS: output[3].reshape(len(tensor))} if self._with_value else decision

    def _call_recurrent(self, tensor: Any, state: Any) -> dict[str, Any]:
        rows, lstm = len(tensor), self._lstm
        if state is None:
            zeros = tensor.new_zeros((lstm.num_layers, rows, lstm.hidden_size), dtype=lstm.weight_hh_l0.dtype)
            state_before = (zeros, zeros)
        else:
            state_before = tuple(part.transpose(0, 1).contiguous() for part in state)
        act, logp, _, values, state_after = self._call(
            tensor, state_before, tensor.new_zeros(rows, dtype=state_before[0].dtype)
        )
        return {
            "act": act,
            names.ACTION_LOGP: logp.reshape(rows),
            names.VF_PREDS: values.reshape(rows),
            "state": tuple(part.transpose(0, 1) for part in state_after),
        }


def policy_of(policy: Any) -> Any:
    """Return the `policy` of an algorithm, a torch module without `forward`; return other policies unchanged."""
    if is_module(policy) and not _has_forward(policy) and callable(getattr(policy, "policy", None)):
        return policy.policy
    return policy


def wrap_peer(policy: Any, *, deterministic: bool = False) -> Any:
    """Wrap a policy of another library as a function of observations; return other policies unchanged.

    Raises PolicySpecError if `deterministic` is true but the policy has no deterministic method.
    """
    if isinstance(policy, PeerPolicy):
        return type(policy)(policy.policy, deterministic=True) if deterministic else policy
    kind = None if isinstance(policy, type) else _kind_of(policy)
    if kind is not None:
        return kind(policy, deterministic=deterministic)
    if deterministic:
        raise PolicySpecError(
            "the policy must be one of Stable-Baselines3 or RLlib for deterministic=True, got a "
            f"{type(policy).__name__}"
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
    if is_module(policy) and (has("get_action_and_value") or (has("get_action") and not _has_policy_signature(policy))):
        return CleanRLAgent
    return None


def _has_forward(module: Any) -> bool:
    return type(module).forward is not sys.modules["torch.nn"].Module.forward


def _has_policy_signature(module: Any) -> bool:
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

"""Policy: the base class of torch policies, which map observations to actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Self

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from samplebatch.arguments import check_names
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.functions import to_numpy, to_torch
from samplebatch.batch.nested.node import KINDS, NODE, node, set_unit, unit_of, values_of
from samplebatch.errors import ArgumentError, ColumnMismatchError, PolicySpecError
from samplebatch.learn.joint_actions import JOINT_SPACES, JointActions
from samplebatch.learn.networks import call_network, first_parameter, set_noise, set_training
from samplebatch.learn.normalization import RunningMeanStd
from samplebatch.policy.action_map import unit_of_policy, unit_of_space

Array = npt.NDArray[Any]

_OBS_BY_MASK = {"mask": "obs", "action_mask": "observation"}
"""Names of action masks in observations, with the name of the observation next to each, in Tianshou and PettingZoo."""
_RENAMED = {
    "deterministic": "deterministic_eval",
    "dist": "dist_fn",
    "eps": "eps_training",
    "epsilon": "eps_training",
    "noise": "exploration_noise",
    "network": "model",
    "net": "model",
}
"""Argument names of other libraries, with the current names."""
_TINY = float(np.finfo(np.float32).eps)
_SCALED = ("scale", "tanh")
"""Mappings of action units that scale actions to the action space."""


class Policy(nn.Module, ABC):
    """Base class of policies, which map observations to actions and are trained by an `Algorithm`.

    Exploration and sampling of actions depend on `is_within_training_step`. All random numbers are drawn from torch's
    default generator.

    Parameters
    ----------
    action_space, observation_space
        Spaces of a single environment.
    action_scaling
        Whether actions in [-1, 1] are scaled to the bounds of the space; only for a Box.
    action_bound_method
        How actions of a Box are bounded to [-1, 1] before scaling: `"clip"`, `"tanh"`, or None for no bounds.

    Attributes
    ----------
    is_within_training_step
        Whether the policy collects training steps or is updated; false during evaluation. Trainers, `Algorithm.update`
        and `policy_within_training_step` set this flag.
    obs_rms
        Running statistics of observations, see `normalize_observations`; None without normalization.

    Raises
    ------
    PolicySpecError
        If the action space is not Discrete, MultiDiscrete, MultiBinary or a Box, `action_scaling` is true for a space
        that is not a bounded Box, or `action_bound_method` is unknown.

    Examples
    --------
    >>> class Always(Policy):
    ...     def forward(self, batch, state=None):
    ...         return Batch(act=torch.full((len(batch.obs), 1), 0.5))
    >>> policy = Always(spaces.Box(-2.0, 2.0, (1,)), action_scaling=True)
    >>> policy.compute_action(np.zeros(3, np.float32))
    array([1.], dtype=float32)
    """

    _action_spaces: ClassVar[Any] = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box
    _action_words: ClassVar[str] = "a Discrete, MultiDiscrete, MultiBinary or Box"
    """Supported action spaces, and their description in errors."""
    _joint: JointActions | None = None
    """Layout of actions with several parts, None for other actions."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Reject unknown keyword arguments; the error suggests similar names."""
        check_names(cls, args, options, _RENAMED)
        return super().__new__(cls)

    def __init__(
        self,
        action_space: gymnasium.Space[Any],
        observation_space: gymnasium.Space[Any] | None = None,
        action_scaling: bool = False,
        action_bound_method: Literal["clip", "tanh"] | None = "clip",
    ) -> None:
        super().__init__()
        if not isinstance(action_space, self._action_spaces):
            raise PolicySpecError(f"action_space must be {self._action_words}, got a {type(action_space).__name__}")
        if action_bound_method not in ("clip", "tanh", None):
            raise PolicySpecError(f"action_bound_method must be 'clip', 'tanh' or None, got {action_bound_method!r}")
        is_bounded = isinstance(action_space, spaces.Box) and action_space.is_bounded()
        if action_scaling and not is_bounded:
            raise PolicySpecError(
                f"action_space must be a Box with finite bounds for action_scaling, got {action_space}"
            )
        self.action_space, self.observation_space = action_space, observation_space
        self.action_scaling, self.action_bound_method = action_scaling, action_bound_method
        self.is_within_training_step = False
        self.obs_rms: RunningMeanStd | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and copying, without the attached algorithm."""
        return {name: value for name, value in vars(self).items() if name != "_learner"}

    def attach_learner(self, algorithm: Any) -> None:
        """Set the algorithm for `learn_on_batch`; copies and pickles of the policy do not contain the algorithm."""
        # The tuple prevents torch from registering the algorithm as a submodule of the policy.
        self._learner = (algorithm,)

    def learn_on_batch(self, samples: Any) -> dict[str, Any]:
        """Update the policy with a train batch as RLlib does; calls `Algorithm.update`.

        Parameters
        ----------
        samples
            A `SampleBatch` or `Batch`: steps in time order for on-policy algorithms, and any rows for other algorithms.

        Returns
        -------
        dict
            `learner_stats`, the metrics of the update; `num_agent_steps_trained`, the number of rows; and
            `num_grad_updates_lifetime`, the number of updates so far.

        Raises
        ------
        PolicySpecError
            If the policy has no algorithm.
        SampleBatchError
            As in `Algorithm.update`.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> from samplebatch.learn import DQN, AdamOptimizerFactory, DiscreteQLearningPolicy
        >>> policy = DiscreteQLearningPolicy(model=nn.Linear(2, 3), action_space=spaces.Discrete(3))
        >>> algorithm = DQN(policy=policy, optim=AdamOptimizerFactory())
        >>> rows = {"actions": [0, 2], "rewards": [1.0, 0.0], "terminateds": [False, True]}
        >>> batch = SampleBatch(obs=np.ones((2, 2)), new_obs=np.ones((2, 2)), **rows)
        >>> list(policy.learn_on_batch(batch)["learner_stats"])
        ['loss']
        """
        (algorithm,) = vars(self).get("_learner", (None,))
        if algorithm is None:
            raise PolicySpecError(
                f"a {type(self).__name__} must have an algorithm to learn on a batch, got none; create one such as "
                "DQN(policy=policy, ...)"
            )
        stats = algorithm.update(samples)
        return {
            "learner_stats": stats.get_loss_stats_dict(),
            "num_agent_steps_trained": len(samples),
            "num_grad_updates_lifetime": algorithm.updates,
        }

    @property
    def is_within_training_step(self) -> bool:
        """Whether the policy collects training steps or is updated; noisy layers then draw noise."""
        return self._is_within_training_step

    @is_within_training_step.setter
    def is_within_training_step(self, enabled: bool) -> None:
        self._is_within_training_step = enabled
        set_noise(self, enabled)

    def train(self, mode: bool = True) -> Self:
        """Set torch's training mode of the policy and its networks."""
        set_training(self, mode)
        return self

    @property
    def action_type(self) -> Literal["discrete", "continuous"]:
        """Kind of the actions."""
        return "continuous" if isinstance(self.action_space, spaces.Box) else "discrete"

    @property
    def action_unit(self) -> ActionUnit | None:
        """Unit of the policy's actions; `"function"` if a subclass overrides `map_action`."""
        if type(self).map_action is not Policy.map_action:
            return ActionUnit("function")
        if self._joint is not None:
            # No other unit describes that only the Box leaves of an action are clipped.
            has_box = any(isinstance(leaf, spaces.Box) for leaf in self._joint.leaves)
            return ActionUnit("function") if has_box else unit_of_space(self.action_space)
        return unit_of_policy(self.action_space, self.action_bound_method, self.action_scaling)

    @abstractmethod
    def forward(self, batch: Batch, state: Any = None) -> Batch:
        """Choose an action for each row.

        Parameters
        ----------
        batch
            Rows with `obs` and optionally `info`: arrays from a collector, tensors from a sampled batch.
        state
            The `state` of the previous call, with one row per row of the batch; rows are zero at the start of an
            episode. None in the first call.

        Returns
        -------
        Batch
            `act`, before exploration noise and `map_action`; `state` of a recurrent policy; `policy`, values stored
            with the steps; and values for the algorithm, such as `logits` and `dist`.
        """

    def observations(self, batch: Batch) -> tuple[Any, torch.Tensor | None]:
        """Convert a batch's observations to network inputs, and extract the mask of allowed actions.

        Masked observations are `Batch(obs=..., mask=...)`, or PettingZoo's `Batch(observation=..., action_mask=...)`.

        Returns
        -------
        obs
            A tensor or batch of tensors on the policy's device; floats have the dtype of the policy's parameters.
        mask
            Boolean tensor, shape (n, actions), or None if all actions are allowed.

        Examples
        --------
        >>> from samplebatch.learn.dqn import DiscreteQLearningPolicy
        >>> policy = DiscreteQLearningPolicy(model=nn.Linear(2, 2), action_space=spaces.Discrete(2))
        >>> policy.observations(
        ...     Batch(obs={"obs": np.ones((1, 2)), "mask": np.array([[1, 0]], np.int8)})
        ... )
        (tensor([[1., 1.]]), tensor([[ True, False]]))
        """
        parameter = first_parameter(self)
        device = torch.device("cpu") if parameter is None else parameter.device
        dtype = torch.float32 if parameter is None else parameter.dtype
        try:
            obs = batch.obs
        except AttributeError:
            raise PolicySpecError(
                f"a policy must be called with a Batch that has 'obs', got a {type(batch).__name__}; pass "
                "Batch(obs=observations), or call compute_action(obs) for one observation"
            ) from None
        if KINDS[type(obs)] == NODE:
            values = obs.__dict__
            for mask_name, obs_name in _OBS_BY_MASK.items():
                if mask_name in values and obs_name in values:
                    mask = _to_tensors(values[mask_name], device, dtype).bool()
                    return self._normalize(_to_tensors(values[obs_name], device, dtype), dtype), mask
        return self._normalize(_to_tensors(obs, device, dtype), dtype), None

    def normalize_observations(self, shape: tuple[int, ...] | None = None, *, clip_max: float = 10.0) -> Self:
        """Enable normalization of observations by running statistics, and return the policy.

        Networks receive `(obs - mean) / std`, clipped; collectors and buffers store unnormalized observations.
        On-policy algorithms and MAPPO add the observations of each update to the statistics after its gradient steps.
        Algorithms that sample from a replay buffer add each row once, before the first update after the row was added;
        from other sources, such as datasets, the algorithms add the observations of each sample. The statistics are
        part of `state_dict`, and therefore of the weights for workers, of checkpoints and of exported policies.

        Parameters
        ----------
        shape
            Shape of an observation; None for the shape of `observation_space`, without the action mask.
        clip_max
            Bound of the absolute value of normalized observations.

        Raises
        ------
        PolicySpecError
            If observations have several shapes, for example in a Dict space without a mask.
        ArgumentError
            If `clip_max` is not a positive number.

        Examples
        --------
        >>> from samplebatch.learn import DiscreteActorPolicy
        >>> policy = DiscreteActorPolicy(actor=nn.Linear(2, 3), action_space=spaces.Discrete(3))
        >>> policy.normalize_observations((2,)).obs_rms.update(np.array([[0.0, 10.0], [2.0, 30.0]]))
        >>> policy.observations(Batch(obs=np.array([[1.0, 30.0]])))[0]
        tensor([[0., 1.]])
        """
        if shape is None:
            shape = _shape_to_normalize(self.observation_space)
        self.obs_rms = RunningMeanStd(shape, clip_max=clip_max).to(next(self.parameters(), torch.empty(0)).device)
        return self

    def update_statistics(self, batch: Batch) -> None:
        """Add a batch's observations to the statistics, if the policy normalizes observations.

        Raises
        ------
        ArgumentError
            If observations are not finite; the statistics are unchanged.
        """
        if self.obs_rms is not None:
            obs = batch.obs
            values = obs.__dict__ if KINDS[type(obs)] == NODE else {}
            parts = [values[name] for mask, name in _OBS_BY_MASK.items() if mask in values and name in values]
            self.obs_rms.update(parts[0] if parts else obs)

    def normalize(self, obs: Any) -> Any:
        """Normalize a tensor of observations by the statistics, if the policy normalizes observations.

        Raises
        ------
        PolicySpecError
            If the policy normalizes observations, but observations have several parts.
        """
        if self.obs_rms is None:
            return obs
        if not isinstance(obs, torch.Tensor):
            raise PolicySpecError(f"observations must be one array to be normalized, got the parts {', '.join(obs)}")
        return self.obs_rms(obs)

    def _normalize(self, obs: Any, dtype: torch.dtype) -> Any:
        return obs if self.obs_rms is None else self.normalize(obs).to(dtype)

    def compute_action(self, obs: Any, info: Mapping[str, Any] | None = None, state: Any = None) -> Any:
        """Return the mapped action for one environment, without exploration noise.

        The observation has no axis for rows; `state` has one row: the state that the previous call to `forward`
        returned.

        Returns
        -------
        An integer for a Discrete space, a dict or tuple for a Dict or Tuple space, otherwise an array.
        """
        parts = values_of(obs)
        rows = np.asarray(obs)[None] if parts is None else Batch.stack([Batch(parts)])
        inputs = {"obs": rows} if info is None else {"obs": rows, "info": Batch.stack([Batch(info)])}
        with torch.no_grad():
            act = self.map_action(self(node(Batch, inputs), state).act)
        if self._joint is not None:
            return self._joint.row(act, 0)
        return int(act[0]) if isinstance(self.action_space, spaces.Discrete) else act[0]

    def map_action(self, act: Any) -> Any:
        """Map actions to the environment's unit; buffers store the unmapped actions.

        Actions of a Box are bounded by `action_bound_method`, and then, if `action_scaling` is true, scaled to the
        bounds of the space. Discrete actions are shifted by the `start` of the space. Box leaves of Dict and Tuple
        spaces are clipped to their bounds.

        Raises
        ------
        PolicySpecError
            If actions to be scaled are outside [-1, 1].
        """
        if self._joint is not None:
            return self._joint.clip(act)
        array: Array = act if type(act) is np.ndarray else to_numpy(act)
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            return array + space.start if space.start else array
        if not isinstance(space, spaces.Box):
            return array
        if self.action_bound_method == "clip":
            array = array.clip(-1.0, 1.0)
        elif self.action_bound_method == "tanh":
            array = np.tanh(array)
        if not self.action_scaling:
            return array
        if self.action_bound_method is None and not (np.abs(array) <= 1.0).all():
            raise PolicySpecError(
                f"actions must be in [-1, 1] to be scaled, got {array.min()} to {array.max()}; "
                "pass an action_bound_method"
            )
        scaled: Array = space.low + (space.high - space.low) * (array + 1.0) / 2.0
        return scaled

    def map_action_inverse(self, act: Any) -> Any:
        """Convert actions, for example random actions of collectors, from the environment's unit to the policy's unit.

        For `"tanh"`, which never reaches the bounds, actions at a bound become large but finite.
        """
        if self._joint is not None:
            return act
        array: Array = act if type(act) is np.ndarray else to_numpy(act)
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            return array - space.start if space.start else array
        if not isinstance(space, spaces.Box):
            return array
        if self.action_scaling:
            array = (array - space.low) * 2.0 / np.maximum(space.high - space.low, _TINY) - 1.0
        if self.action_bound_method == "tanh":
            array = np.arctanh(array.clip(_TINY - 1.0, 1.0 - _TINY))
        return array

    def in_policy_unit(self, batch: Batch) -> Batch:
        """Return rows with their actions converted to the policy's unit.

        Rows may contain actions in the environment's unit, such as the actions of another library's dataset, or actions
        of a policy that scales actions differently from this policy. Actions of unknown unit, and actions that a
        collector's `map_action` mapped, are unchanged.

        Raises
        ------
        ColumnMismatchError
            If actions are in the environment's unit, and the policy overrides `map_action` without
            `map_action_inverse`.

        Examples
        --------
        >>> from samplebatch import ActionUnit, SampleBatch
        >>> from samplebatch.learn.sac import SACPolicy
        >>> rows = SampleBatch(
        ...     act=np.array([[2.0]], np.float32), _action_unit=ActionUnit()
        ... ).as_batch()
        >>> steer = spaces.Box(-2.0, 2.0, (1,))
        >>> policy = SACPolicy(actor=nn.Linear(1, 2), action_space=steer, action_scaling=True)
        >>> policy.in_policy_unit(rows).act
        array([[1.]], dtype=float32)
        """
        unit = unit_of(batch)
        if unit is None or "act" not in batch.__dict__:
            return batch
        target = self.action_unit
        is_scaled = unit.mapping in _SCALED and target is not None and target.mapping in _SCALED
        if target is None or unit == target or not (unit.mapping is None or is_scaled):
            return batch
        if type(self).map_action is not Policy.map_action and (
            type(self).map_action_inverse is Policy.map_action_inverse
        ):
            raise ColumnMismatchError(
                f"column 'act' must be in the unit of a {type(self).__name__}, got the environment's unit; "
                "implement map_action_inverse for its map_action"
            )
        act = unit.to_environment(batch.__dict__["act"])
        if target.mapping == "function":
            inverse = self.map_action_inverse(act)
            act = torch.as_tensor(inverse, device=act.device) if isinstance(act, torch.Tensor) else inverse
        else:
            act = target.from_environment(act)
        converted = node(Batch, {**batch.__dict__, "act": act})
        set_unit(converted, target)
        return converted

    def add_exploration_noise(self, act: Any, batch: Batch) -> Any:
        """Add exploration noise to actions; the base class adds no noise.

        Parameters
        ----------
        act, batch
            Actions that `forward` returned, as an array that may be modified in place; and the input of `forward`.
        """
        return act

    def get_exploration_state(self) -> dict[str, Any]:
        """Return the exploration state that is not in parameters or buffers; empty in the base class.

        The exploration state is part of `Algorithm.state_dict`, but not of the weights for workers: each worker's copy
        of the policy explores independently.
        """
        return {}

    def set_exploration_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_exploration_state`."""
        return None

    def note_steps(self, steps: int) -> None:
        """Add the steps of policy copies in other processes to schedules; the base class has no schedules."""
        return None


@contextmanager
def policy_within_training_step(policy: Policy, enabled: bool = True) -> Iterator[None]:
    """Context manager that sets whether a policy is within a training step.

    Within a training step, the policy explores and samples actions. Outside training steps, a policy with
    `deterministic_eval` chooses the most likely actions.

    Examples
    --------
    >>> from samplebatch.learn.dqn import DiscreteQLearningPolicy
    >>> policy = DiscreteQLearningPolicy(model=nn.Linear(2, 2), action_space=spaces.Discrete(2))
    >>> with policy_within_training_step(policy):
    ...     print(policy.is_within_training_step)
    True
    >>> policy.is_within_training_step
    False
    """
    before = policy.is_within_training_step
    policy.is_within_training_step = enabled
    try:
        yield
    finally:
        policy.is_within_training_step = before


@contextmanager
def torch_train_mode(module: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Context manager that sets torch's training mode of a module.

    Examples
    --------
    >>> module = nn.Dropout()
    >>> with torch_train_mode(module, False):
    ...     print(module.training)
    False
    >>> module.training
    True
    """
    before = module.training
    module.train(enabled)
    try:
        yield
    finally:
        if module.training != before:
            module.train(before)


def _shape_to_normalize(space: Any) -> tuple[int, ...]:
    """Return the shape of a Box, or of the observation in a Dict with an action mask."""
    if isinstance(space, spaces.Dict):
        parts = [space[name] for mask, name in _OBS_BY_MASK.items() if {mask, name} <= set(space.keys())]
        space = parts[0] if parts else space
    if not isinstance(space, spaces.Box):
        raise PolicySpecError(
            f"observation_space must be a Box to be normalized, got {space}; pass the shape of an observation"
        )
    return tuple(space.shape)


def _to_tensors(values: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if KINDS[type(values)] == NODE:
        return node(Batch, {name: _to_tensors(part, device, dtype) for name, part in values.__dict__.items()})
    tensor = values.to(device) if isinstance(values, torch.Tensor) else to_torch(values, device=device)
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def mask_logits(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Set the logits of disallowed actions to a finite value below the smallest logit x: x - max(1, 0.01 |x|).

    Tianshou always subtracts 1; for large logits, rounding discards this difference.

    >>> mask_logits(torch.tensor([[-2e9, -3e9]]), torch.tensor([[False, True]])).argmax(-1)
    tensor([1])
    """
    lowest = logits.min()
    return torch.where(allowed, logits, lowest - (0.01 * lowest.abs()).clamp(min=1.0))


def categorical(logits: torch.Tensor) -> Categorical:
    """Return the distribution of discrete actions with given logits."""
    # Drawing actions detects diverged networks; validating all logits in each call is slower.
    return Categorical(logits=logits, validate_args=False)


def categorical_of_probabilities(probabilities: torch.Tensor) -> Categorical:
    """Return the distribution of discrete actions with given probabilities."""
    return Categorical(probs=probabilities, validate_args=False)


def diagonal_normal(parameters: tuple[torch.Tensor, torch.Tensor]) -> Independent[Normal]:
    """Return the distribution of continuous actions with given means and standard deviations."""
    return Independent(Normal(*parameters, validate_args=False), 1, validate_args=False)


class ProbabilisticActorPolicy(Policy):
    """Policy that samples actions from a distribution; evaluation is optionally deterministic.

    Parameters
    ----------
    actor
        Network that returns the parameters of a distribution for observations, and a new state if the network is
        recurrent.
    dist_fn
        Function from the parameters that the actor returns to a torch distribution. By default, a categorical
        distribution for discrete actions (of probabilities if the actor's `softmax_output` is true, of logits
        otherwise), normal distributions for a Box, and `JointActions` for MultiDiscrete, MultiBinary, Dict and Tuple
        spaces. If the distribution returns one log-probability per action dimension, the log-probabilities are summed.
    deterministic_eval
        Whether the most likely action is chosen outside training steps.
    action_space, observation_space, action_scaling, action_bound_method
        See `Policy`. Actions of a Box with bounds are scaled by default.

    Examples
    --------
    >>> policy = ProbabilisticActorPolicy(
    ...     actor=nn.Linear(2, 3), action_space=spaces.Discrete(3), deterministic_eval=True
    ... )
    >>> policy(Batch(obs=torch.zeros(4, 2))).act.shape
    torch.Size([4])
    """

    _action_spaces: ClassVar[Any] = (spaces.Discrete, spaces.Box, *JOINT_SPACES)
    _action_words = "a Discrete, MultiDiscrete, MultiBinary, Box, Dict or Tuple"
    records_log_probability: bool = False
    """Whether `forward` returns log-probabilities as `action_logp`, which `IMPALA` and `APPO` require."""

    def __init__(
        self,
        *,
        actor: nn.Module,
        dist_fn: Callable[[Any], Distribution] | None = None,
        deterministic_eval: bool = False,
        action_space: gymnasium.Space[Any],
        observation_space: gymnasium.Space[Any] | None = None,
        action_scaling: bool | None = None,
        action_bound_method: Literal["clip", "tanh"] | None = "clip",
    ) -> None:
        is_box = isinstance(action_space, spaces.Box)
        scaling = is_box and action_space.is_bounded() if action_scaling is None else action_scaling  # type: ignore[attr-defined]
        super().__init__(action_space, observation_space, scaling, action_bound_method if is_box else None)
        self.actor = actor
        self._is_softmax = bool(getattr(actor, "softmax_output", False))
        if dist_fn is None and isinstance(action_space, JOINT_SPACES):
            self._joint = dist_fn = JointActions(action_space)
        if dist_fn is None:
            discrete = categorical_of_probabilities if self._is_softmax else categorical
            dist_fn = diagonal_normal if is_box else discrete
        self.dist_fn: Callable[[Any], Distribution] = dist_fn
        self.deterministic_eval = deterministic_eval

    def distribution(
        self, batch: Batch, state: Any = None, steps: torch.Tensor | None = None
    ) -> tuple[Distribution, Any]:
        """Return the action distribution of each row, and the new state.

        Masked discrete actions have probability 0.

        Parameters
        ----------
        batch
            Rows with `obs`, or sequences with an additional time axis.
        state
            The state before each row or sequence; None for zeros.
        steps
            Boolean mask of valid steps in sequences, shape (n, length); the distribution is over the valid steps in
            order.
        """
        obs, mask = self.observations(batch)
        output, after = call_network(self.actor, obs, state)
        if mask is not None and self._joint is not None:
            output = self._joint.mask(output, mask)
        elif mask is not None:
            output = output.masked_fill(~mask, 0.0 if self._is_softmax else torch.finfo(output.dtype).min)
        if steps is not None:
            output = tuple(part[steps] for part in output) if isinstance(output, tuple) else output[steps]
        return self.dist_fn(output), after

    def forward(self, batch: Batch, state: Any = None) -> Batch:
        """Return actions as `act`, their distribution as `dist`, and the state of a recurrent actor as `state`.

        Raises
        ------
        PolicySpecError
            If observations or parameters are not finite.
        """
        dist, after = self.distribution(batch, state)
        if self.deterministic_eval and not self.is_within_training_step:
            act = dist.mode
        else:
            try:
                act = dist.sample()
            except RuntimeError as error:
                finite = all(bool(parameter.isfinite().all()) for parameter in self.parameters())
                subject = "observations" if finite else "parameters of a policy"
                raise PolicySpecError(f"{subject} must be finite for actions to be drawn: {error}") from None
        decision = {"act": act, "dist": dist}
        if self.records_log_probability:
            decision["action_logp"] = log_probability(dist, act)
        if after is not None:
            decision["state"] = after
        return node(Batch, decision)


class DiscreteActorPolicy(ProbabilisticActorPolicy):
    """Policy that samples discrete actions from the logits of an actor network.

    Parameters
    ----------
    actor, action_space, **options
        See `ProbabilisticActorPolicy`; the action space is Discrete.

    Raises
    ------
    PolicySpecError
        If the action space is not Discrete.
    """

    _action_spaces = spaces.Discrete
    _action_words = "a Discrete space"


def require_critic(critic: nn.Module) -> None:
    """Raise ArgumentError if a critic is a policy."""
    if isinstance(critic, Policy):
        raise ArgumentError(
            f"critic must be a network, got a {type(critic).__name__}; policy and critic may be swapped"
        )


def log_probability(dist: Distribution, act: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each action, shape (n,), summed over action dimensions.

    >>> log_probability(categorical(torch.zeros(2, 4)), torch.tensor([0, 3])).exp()
    tensor([0.2500, 0.2500])
    """
    log_prob: torch.Tensor = dist.log_prob(act)
    return log_prob if log_prob.ndim == 1 else log_prob.flatten(1).sum(-1)

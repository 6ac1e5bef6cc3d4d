"""Policy: the base of policies in torch, from observations to actions that environments take."""

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
from samplebatch.learn.networks import ask, first_parameter, set_noise, set_training
from samplebatch.learn.normalization import RunningMeanStd
from samplebatch.policy.action_map import unit_of_policy, unit_of_space

Array = npt.NDArray[Any]

_MASKED = {"mask": "obs", "action_mask": "observation"}
"""The names of masks in observations, and what the rest is called beside each: Tianshou's words and PettingZoo's."""
_RENAMED = {
    "deterministic": "deterministic_eval",
    "dist": "dist_fn",
    "eps": "eps_training",
    "epsilon": "eps_training",
    "noise": "exploration_noise",
    "network": "model",
    "net": "model",
}
"""Arguments in other libraries, with their names here."""
_TINY = float(np.finfo(np.float32).eps)
_SCALED = ("scale", "tanh")
"""Mappings of units whose actions are scaled to the action space."""


class Policy(nn.Module, ABC):
    """A mapping from observations to actions, asked by collectors and trained by an `Algorithm`.

    Exploration and sampling of actions depend on `is_within_training_step`. All random numbers come from torch's
    default generator.

    Parameters
    ----------
    action_space
        The space of one environment's actions.
    observation_space
        The space of one environment's observations.
    action_scaling
        Whether actions in [-1, 1] are scaled to the bounds of the space; for a Box only.
    action_bound_method
        How actions of a Box come into [-1, 1] before: `"clip"` cuts them off, `"tanh"` squashes them, None leaves
        them.

    Attributes
    ----------
    is_within_training_step
        Whether the policy collects training steps or is updated, as opposed to evaluated. Trainers, `Algorithm.update`
        and `policy_within_training_step` set it.
    obs_rms
        Running statistics of observations, see `normalize_observations`; None if they are not normalized.

    Raises
    ------
    PolicySpecError
        If the space is of another kind than Discrete, MultiDiscrete, MultiBinary and Box, is to be scaled and no
        bounded Box, or the method is another.

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
    """The kinds of spaces that the policy can act in, and how its error names them."""
    _joint: JointActions | None = None
    """The layout of actions with several parts, where the policy draws them by `JointActions`."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Reject unknown arguments with the near names."""
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
        bounded = isinstance(action_space, spaces.Box) and action_space.is_bounded()
        if action_scaling and not bounded:
            raise PolicySpecError("action_scaling must be left out where actions are no Box with bounds on all sides")
        self.action_space, self.observation_space = action_space, observation_space
        self.action_scaling, self.action_bound_method = action_scaling, action_bound_method
        self.is_within_training_step = False
        self.obs_rms: RunningMeanStd | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and copying, without the algorithm that trains the policy."""
        return {name: value for name, value in vars(self).items() if name != "_learner"}

    def attach_learner(self, algorithm: Any) -> None:
        """Set the algorithm that `learn_on_batch` updates the policy with; copies and pickles do not have it."""
        # In a tuple, the algorithm is not registered as a part of the policy.
        self._learner = (algorithm,)

    def learn_on_batch(self, samples: Any) -> dict[str, Any]:
        """Update the policy with a train batch by its algorithm's `update`, as RLlib's policies do.

        Parameters
        ----------
        samples
            A `SampleBatch` or `Batch`: steps in time order for algorithms that learn on policy, any rows for others.

        Returns
        -------
        dict
            `learner_stats`, the figures of the update; `num_agent_steps_trained`, the rows; and
            `num_grad_updates_lifetime`, the updates so far.

        Raises
        ------
        PolicySpecError
            If no algorithm trains the policy.
        SampleBatchError
            As the algorithm's `update` does.

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
                f"a {type(self).__name__} must be trained by an algorithm to learn on a batch, it is by none; create "
                "one with it, such as DQN(policy=policy, ...)"
            )
        stats = algorithm.update(samples)
        return {
            "learner_stats": stats.get_loss_stats_dict(),
            "num_agent_steps_trained": len(samples),
            "num_grad_updates_lifetime": algorithm.updates,
        }

    @property
    def is_within_training_step(self) -> bool:
        """Whether the policy collects training steps or is updated, as opposed to evaluated.

        Noisy layers of its networks draw noise then.
        """
        return self._is_within_training_step

    @is_within_training_step.setter
    def is_within_training_step(self, enabled: bool) -> None:
        self._is_within_training_step = enabled
        set_noise(self, enabled)

    def train(self, mode: bool = True) -> Self:
        """Set torch's training mode."""
        set_training(self, mode)
        return self

    @property
    def action_type(self) -> Literal["discrete", "continuous"]:
        """Whether actions are numbers of choices, or measures."""
        return "continuous" if isinstance(self.action_space, spaces.Box) else "discrete"

    @property
    def action_unit(self) -> ActionUnit | None:
        """The unit of the policy's actions; of a `map_action` of its own, a function that is not recorded."""
        if type(self).map_action is not Policy.map_action:
            return ActionUnit("function")
        if self._joint is not None:
            # Box leaves are clipped, which no unit describes for a part of an action.
            has_box = any(isinstance(leaf, spaces.Box) for leaf in self._joint.leaves)
            return ActionUnit("function") if has_box else unit_of_space(self.action_space)
        return unit_of_policy(self.action_space, self.action_bound_method, self.action_scaling)

    @abstractmethod
    def forward(self, batch: Batch, state: Any = None) -> Batch:
        """Choose an action for each row.

        Parameters
        ----------
        batch
            Rows with `obs`, and maybe `info`: arrays from a collector, tensors from a sampled batch.
        state
            The `state` of the last call, with a row for each of the batch's, zeros where an episode begins; None at
            first.

        Returns
        -------
        Batch
            `act`, before any noise and `map_action`; `state`, if the policy is recurrent; `policy`, values that are
            stored with the steps; and others that the algorithm uses, such as `logits` and `dist`.
        """

    def observations(self, batch: Batch) -> tuple[Any, torch.Tensor | None]:
        """Return a batch's observations as tensors for networks, and the mask of allowed actions.

        A mask comes with the observations: `Batch(obs=..., mask=...)`, or PettingZoo's `Batch(observation=...,
        action_mask=...)`.

        Returns
        -------
        obs
            Tensors on the policy's device, floats in the dtype of its parameters: one, or a batch of them.
        mask
            Flags, shape (n, actions), or None where all actions are allowed.

        Examples
        --------
        >>> from samplebatch.learn.dqn import DiscreteQLearningPolicy
        >>> policy = DiscreteQLearningPolicy(model=nn.Linear(2, 2), action_space=spaces.Discrete(2))
        >>> policy.observations(Batch(obs={"obs": np.ones((1, 2)), "mask": np.array([[1, 0]], np.int8)}))
        (tensor([[1., 1.]]), tensor([[ True, False]]))
        """
        parameter = first_parameter(self)
        device = torch.device("cpu") if parameter is None else parameter.device
        dtype = torch.float32 if parameter is None else parameter.dtype
        obs = batch.obs
        if KINDS[type(obs)] == NODE:
            held = obs.__dict__
            for name, rest in _MASKED.items():
                if name in held and rest in held:
                    mask = _tensors(held[name], device, dtype).bool()
                    return self._normalize(_tensors(held[rest], device, dtype), dtype), mask
        return self._normalize(_tensors(obs, device, dtype), dtype), None

    def normalize_observations(self, shape: tuple[int, ...] | None = None, *, clip_max: float = 10.0) -> Self:
        """Normalize observations by running statistics from now on, and return the policy.

        Networks receive `(obs - mean) / std`, clipped; collectors and buffers store observations as they are.
        Algorithms that learn on policy add the observations of each update to the statistics after its gradient steps.
        With all other algorithms the statistics change only by `obs_rms.update`, for example with the observations of a
        dataset. The statistics are part of `state_dict`: workers, test collectors, checkpoints and exported policies
        share them.

        Parameters
        ----------
        shape
            Shape of an observation; None for the shape of `observation_space`, without a mask of actions.
        clip_max
            Bound of the absolute value of normalized observations.

        Raises
        ------
        PolicySpecError
            If observations have no single shape, as those of a Dict space without a mask.
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
            parts = [values[rest] for name, rest in _MASKED.items() if name in values and rest in values]
            self.obs_rms.update(parts[0] if parts else obs)

    def _normalize(self, obs: Any, dtype: torch.dtype) -> Any:
        if self.obs_rms is None:
            return obs
        if not isinstance(obs, torch.Tensor):
            raise PolicySpecError(f"observations must be one array to be normalized, got the parts {', '.join(obs)}")
        return self.obs_rms(obs).to(dtype)

    def compute_action(self, obs: Any, info: Mapping[str, Any] | None = None, state: Any = None) -> Any:
        """Return the mapped action for one environment, without exploration noise.

        Parameters
        ----------
        obs
            An observation, without an axis for rows.
        info
            What the environment said.
        state
            The `state` of the last call of `forward` for one row.

        Returns
        -------
        An integer for a Discrete space, a dict or tuple for such a space, else an array.
        """
        named = values_of(obs)
        rows = np.asarray(obs)[None] if named is None else Batch.stack([Batch(named)])
        asked = {"obs": rows} if info is None else {"obs": rows, "info": Batch.stack([Batch(info)])}
        with torch.no_grad():
            act = self.map_action(self(node(Batch, asked), state).act)
        if self._joint is not None:
            return self._joint.row(act, 0)
        return int(act[0]) if isinstance(self.action_space, spaces.Discrete) else act[0]

    def map_action(self, act: Any) -> Any:
        """Map actions to the environment's unit; buffers store the unmapped actions.

        Actions of a Box are bounded by the policy's method, then scaled to the space if they are to be; those of a
        Discrete space begin at its `start`. Box leaves of a Dict or Tuple space are clipped to their bounds.

        Parameters
        ----------
        act
            An array or a tensor of actions.

        Raises
        ------
        PolicySpecError
            If actions to be scaled lie outside [-1, 1].
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
            raise PolicySpecError("actions must be in [-1, 1] to be scaled; pass an action_bound_method")
        scaled: Array = space.low + (space.high - space.low) * (array + 1.0) / 2.0
        return scaled

    def map_action_inverse(self, act: Any) -> Any:
        """Map actions in the environment's unit to the policy's unit.

        Collectors do so with random actions. Those at a bound, which `"tanh"` never reaches, become large, not
        infinite.
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
        """Return rows with their actions in the policy's unit.

        Those of the environment's unit, such as the ones of a dataset of another library, are converted; so are those
        of a scaled policy for one that is scaled otherwise. All others are taken as they are: actions of unknown unit,
        and those that a collector's `map_action` mapped in place of the policy's.

        Parameters
        ----------
        batch
            Rows with `act`, arrays or tensors, and their `action_unit`.

        Raises
        ------
        ColumnMismatchError
            If actions are in the environment's unit, and the policy has a `map_action` of its own without a
            `map_action_inverse`.

        Examples
        --------
        >>> from samplebatch import ActionUnit, SampleBatch
        >>> from samplebatch.learn.sac import SACPolicy
        >>> rows = SampleBatch(act=np.array([[2.0]], np.float32), _action_unit=ActionUnit()).as_batch()
        >>> steer = spaces.Box(-2.0, 2.0, (1,))
        >>> policy = SACPolicy(actor=nn.Linear(1, 2), action_space=steer, action_scaling=True)
        >>> policy.in_policy_unit(rows).act
        array([[1.]], dtype=float32)
        """
        unit = unit_of(batch)
        if unit is None or "act" not in batch.__dict__:
            return batch
        own = self.action_unit
        is_scaled = unit.mapping in _SCALED and own is not None and own.mapping in _SCALED
        if own is None or unit == own or not (unit.mapping is None or is_scaled):
            return batch
        if type(self).map_action is not Policy.map_action and (
            type(self).map_action_inverse is Policy.map_action_inverse
        ):
            raise ColumnMismatchError(
                f"column 'act' must be in the unit of a {type(self).__name__}, got the environment's; "
                "give the policy a map_action_inverse that belongs to its map_action"
            )
        act = unit.to_environment(batch.__dict__["act"])
        if own.mapping == "function":
            inverse = self.map_action_inverse(act)
            act = torch.as_tensor(inverse, device=act.device) if isinstance(act, torch.Tensor) else inverse
        else:
            act = own.from_environment(act)
        made = node(Batch, {**batch.__dict__, "act": act})
        set_unit(made, own)
        return made

    def add_exploration_noise(self, act: Any, batch: Batch) -> Any:
        """Add noise to actions, where the policy has some; this one has none.

        Parameters
        ----------
        act
            The actions that `forward` gave for the batch, an array; it may be changed.
        batch
            What it was asked about.
        """
        return act

    def get_exploration_state(self) -> dict[str, Any]:
        """Return the state of exploration beside parameters and buffers, such as a noise's drift; here there is none.

        It is no weight that collectors get: their copies of the policy drift by themselves. `Algorithm.state_dict` has
        it.
        """
        return {}

    def set_exploration_state(self, state: Mapping[str, Any]) -> None:
        """Explore on from a state that `get_exploration_state` returned."""
        return None

    def note_steps(self, steps: int) -> None:
        """Count steps that copies of the policy have made in other processes, for schedules; this one has none.

        Parameters
        ----------
        steps
            How many.
        """
        return None


@contextmanager
def policy_within_training_step(policy: Policy, enabled: bool = True) -> Iterator[None]:
    """Set whether a policy is within a training step, for the length of a block.

    Within one it explores and draws its actions; outside, a policy with `deterministic_eval` takes the best.

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
    """Set whether a module is in torch's training mode, which dropout and the like look at, for the length of a block.

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
    """Return the shape of the observations of a Box, or of the part of a Dict that is beside a mask."""
    if isinstance(space, spaces.Dict):
        parts = [space[rest] for name, rest in _MASKED.items() if {name, rest} <= set(space.keys())]
        space = parts[0] if parts else space
    if not isinstance(space, spaces.Box):
        raise PolicySpecError(
            f"observation_space must be a Box to be normalized, got {space}; pass the shape of an observation"
        )
    return tuple(space.shape)


def _tensors(values: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if KINDS[type(values)] == NODE:
        return node(Batch, {name: _tensors(part, device, dtype) for name, part in values.__dict__.items()})
    tensor = values.to(device) if isinstance(values, torch.Tensor) else to_torch(values, device=device)
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def categorical(logits: torch.Tensor) -> Categorical:
    """Return the distribution of discrete actions with given logits."""
    # Networks that diverge are detected when actions are drawn; validating all logits each time takes longer.
    return Categorical(logits=logits, validate_args=False)


def categorical_of_probabilities(probabilities: torch.Tensor) -> Categorical:
    """Return the distribution of discrete actions with given probabilities."""
    return Categorical(probs=probabilities, validate_args=False)


def diagonal_normal(parameters: tuple[torch.Tensor, torch.Tensor]) -> Independent[Normal]:
    """Return the distribution of continuous actions with given means and standard deviations."""
    return Independent(Normal(*parameters, validate_args=False), 1, validate_args=False)


class ProbabilisticActorPolicy(Policy):
    """Policy that samples actions from a distribution; optionally the most likely ones in evaluation.

    Parameters
    ----------
    actor
        From observations to the parameters of a distribution, and to a state if it is recurrent.
    dist_fn
        From these parameters to a torch distribution. By default, a categorical distribution for discrete actions (of
        probabilities if the actor has `softmax_output`, of logits otherwise), normal distributions for a Box, and
        `JointActions` for MultiDiscrete, MultiBinary, Dict and Tuple spaces. A
        distribution of scalars per action dimension is summed over the dimensions.
    deterministic_eval
        Whether the most likely action is chosen outside of training steps.
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
    """Whether actions come with their log-probability, as `action_logp`; `IMPALA` and `APPO` need the column."""

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
        box = isinstance(action_space, spaces.Box)
        scaling = box and action_space.is_bounded() if action_scaling is None else action_scaling  # type: ignore[attr-defined]
        super().__init__(action_space, observation_space, scaling, action_bound_method if box else None)
        self.actor = actor
        self._is_softmax = bool(getattr(actor, "softmax_output", False))
        if dist_fn is None and isinstance(action_space, JOINT_SPACES):
            self._joint = dist_fn = JointActions(action_space)
        if dist_fn is None:
            for_choices = categorical_of_probabilities if self._is_softmax else categorical
            dist_fn = diagonal_normal if box else for_choices
        self.dist_fn: Callable[[Any], Distribution] = dist_fn
        self.deterministic_eval = deterministic_eval

    def distribution(
        self, batch: Batch, state: Any = None, steps: torch.Tensor | None = None
    ) -> tuple[Distribution, Any]:
        """Return the distribution of the actions of each row, and the state after it.

        Discrete actions that a mask forbids have probability 0.

        Parameters
        ----------
        batch
            Rows with `obs`, or sequences of them, an axis more.
        state
            The state before each row or sequence; None for one without.
        steps
            Which steps of sequences are there, shape (n, length): the distribution is of these, one after the other.
        """
        obs, mask = self.observations(batch)
        output, after = ask(self.actor, obs, state)
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
            If no actions can be drawn, as observations or parameters are not finite.
        """
        dist, after = self.distribution(batch, state)
        if self.deterministic_eval and not self.is_within_training_step:
            act = dist.mode
        else:
            try:
                act = dist.sample()
            except RuntimeError as error:
                finite = all(bool(own.isfinite().all()) for own in self.parameters())
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
        See `ProbabilisticActorPolicy`; actions are Discrete.

    Raises
    ------
    PolicySpecError
        If the action space is not Discrete.
    """

    _action_spaces = spaces.Discrete
    _action_words = "a Discrete space"


def require_critic(critic: nn.Module) -> None:
    """Raise ArgumentError if an algorithm gets a policy as its critic."""
    if isinstance(critic, Policy):
        raise ArgumentError(
            f"critic must be a network, got a {type(critic).__name__}; policy and critic may be swapped"
        )


def log_probability(dist: Distribution, act: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each action, shape (n,), summed over its parts where the distribution has some.

    >>> log_probability(categorical(torch.zeros(2, 4)), torch.tensor([0, 3])).exp()
    tensor([0.2500, 0.2500])
    """
    found: torch.Tensor = dist.log_prob(act)
    return found if found.ndim == 1 else found.flatten(1).sum(-1)

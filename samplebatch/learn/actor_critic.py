"""On-policy actor-critic algorithms: advantage estimation, and minibatches of steps or sequences."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributions import Distribution

from samplebatch.arguments import fraction, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sequences import chop, pack
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError, ColumnNotFoundError
from samplebatch.learn.algorithm import Indices, OnPolicyAlgorithm
from samplebatch.learn.networks import call_network, recurrent_parts
from samplebatch.learn.normalization import RunningMeanStd
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import ProbabilisticActorPolicy, log_probability, require_critic
from samplebatch.policy.state import state_of

Floats = npt.NDArray[np.float64]
Evaluated = Iterator[tuple[Batch, Distribution, torch.Tensor]]
"""Minibatches with the action distribution and the value of each row."""
_MINIBATCH_COLUMNS = ("obs", "act", "adv", "returns", "v_s", "logp_old")


class _Observed(NamedTuple):
    """Rows that contain only observations; `torch.compile` can trace this type but not a `Batch`."""

    obs: Any


class ActorCriticOnPolicyAlgorithm(OnPolicyAlgorithm[ProbabilisticActorPolicy], ABC):
    """Base class of on-policy actor-critic algorithms, with generalized advantage estimation.

    If the policy is recurrent, minibatches consist of sequences: episodes are split into sequences of at most
    `sequence_length` steps. The policy evaluates each sequence from the recurrent state that was stored at its first
    step.

    Parameters
    ----------
    policy, critic
        Policy to train, and a network that maps observations to values. A recurrent critic must share the recurrent
        layers of the actor.
    optim, max_grad_norm
        Optimizer factory for policy and critic, and maximum L2 norm of gradients; None for no clipping.
    gae_lambda, gamma, allow_nonfinite
        Decay of advantages, and discount per step; see `Algorithm` for `allow_nonfinite`.
    max_batchsize
        Maximum number of rows per call of a network that computes values or log-probabilities before the gradient
        steps.
    return_scaling
        Whether the critic's targets are divided by the running standard deviation of returns.
    normalize_rewards
        Whether rewards are divided by the running standard deviation of discounted returns, and clipped to [-10, 10];
        Engstrom et al., arXiv:2005.12729, section 3. The discounted return of each environment (one ring of the buffer)
        starts at 0 in each episode: `R = gamma * R + reward`. Buffers store unnormalized rewards.
    sequence_length
        Maximum number of steps per sequence, for recurrent policies.

    Raises
    ------
    ArgumentError
        If an argument is out of range, or the critic has its own recurrent layers.
    """

    _policy_class = ProbabilisticActorPolicy

    def __init__(
        self,
        *,
        policy: ProbabilisticActorPolicy,
        critic: nn.Module,
        optim: OptimizerFactory,
        max_grad_norm: float | None = None,
        gae_lambda: float = 0.95,
        max_batchsize: int = 256,
        gamma: float = 0.99,
        return_scaling: bool = False,
        normalize_rewards: bool = False,
        sequence_length: int = 32,
        allow_nonfinite: bool = False,
    ) -> None:
        require_critic(critic)
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        if not set(recurrent_parts(critic)) <= set(policy.modules()):
            raise ArgumentError(
                "critic must share the actor's recurrent layers, whose state is collected, got other recurrent layers"
            )
        self._is_recurrent = bool(recurrent_parts(policy))
        self.critic = critic
        self.gae_lambda, self.gamma = fraction("gae_lambda", gae_lambda), fraction("gamma", gamma)
        self.max_batchsize = whole("max_batchsize", max_batchsize, 1)
        self.sequence_length = whole("sequence_length", sequence_length, 1)
        self.ret_rms = RunningMeanStd() if return_scaling else None
        self.rew_rms = RunningMeanStd() if normalize_rewards else None
        self._discounted_returns: list[float] = []
        self.optim = self._create_optimizer(nn.ModuleList([policy, critic]), optim, max_grad_norm)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the state of `Algorithm` and the discounted returns of running episodes."""
        return {**super().get_extra_state(), "discounted_returns": list(self._discounted_returns)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_extra_state`.

        Raises the same errors as `Algorithm.set_extra_state`.
        """
        super().set_extra_state(state)
        self._discounted_returns = list(state.get("discounted_returns", ()))

    # Rewards

    def _sample_batch(self, buffer: Any, sample_size: int | None) -> tuple[Batch, Indices]:
        batch, indices = super()._sample_batch(buffer, sample_size)
        if self.rew_rms is not None:
            returns = self._discount_forward(batch, buffer, indices)
            self.rew_rms.update(returns[np.isfinite(returns)])
            batch.rew = (batch.rew / self.rew_rms.std.to(batch.rew)).clamp(-10.0, 10.0)
        return batch, indices

    def _discount_forward(self, batch: Batch, buffer: Any, indices: Indices) -> Floats:
        """Return, for each step, the discounted sum of its episode's rewards up to this step, shape (n,)."""
        rewards = batch.rew.double().cpu().numpy()
        if rewards.ndim != 1:
            raise ArgumentError(f"rewards must be numbers to be normalized, got shape {rewards.shape[1:]} per step")
        ends = (batch.terminated | batch.truncated).cpu().numpy()
        sizes = [part.maxsize for part in getattr(buffer, "buffers", [buffer])]
        rings = np.searchsorted(np.cumsum(sizes), indices, side="right")
        running = [*self._discounted_returns, *[0.0] * (len(sizes) - len(self._discounted_returns))]
        returns: Floats = np.empty(len(rewards))
        for row, (ring, reward, end) in enumerate(zip(rings.tolist(), rewards.tolist(), ends.tolist(), strict=True)):
            returns[row] = running[ring] = self.gamma * running[ring] + reward
            if end or not np.isfinite(returns[row]):
                running[ring] = 0.0
        self._discounted_returns = running
        return returns

    # Estimates

    @torch.no_grad()
    def _add_returns_and_advantages(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        values, next_values = [], []
        for rows in batch.split(self.max_batchsize, shuffle=False, merge_last=True):
            before = state_of(rows)
            after = None if before is None else self.policy.distribution(rows, before)[1]
            values.append(self._values(rows.obs, before))
            next_values.append(self._values(rows.obs_next, after))
        batch.v_s = torch.cat(values)
        scale = 1.0 if self.ret_rms is None else self.ret_rms.std.item()
        estimates = (torch.cat(parts).cpu().numpy() * scale for parts in (values, next_values))
        returns, advantages = self._estimate(batch, buffer, indices, *estimates)
        if self.ret_rms is not None:
            # Non-finite returns are reported with the loss.
            self.ret_rms.update(returns[np.isfinite(returns)])
        batch.returns = torch.as_tensor(returns / scale).to(batch.v_s)
        batch.adv = torch.as_tensor(advantages).to(batch.v_s)
        return batch

    def _estimate(
        self, batch: Batch, buffer: ReplayBuffer, indices: Indices, values: Floats, next_values: Floats
    ) -> tuple[Floats, Floats]:
        return self.compute_episodic_return(
            batch, buffer, indices, v_s_=next_values, v_s=values, gamma=self.gamma, gae_lambda=self.gae_lambda
        )

    @torch.no_grad()
    def _add_log_probabilities(self, batch: Batch) -> Batch:
        log_probabilities = [
            log_probability(self.policy.distribution(rows, state_of(rows))[0], rows.act)
            for rows in batch.split(self.max_batchsize, shuffle=False, merge_last=True)
        ]
        batch.logp_old = torch.cat(log_probabilities)
        return batch

    def _values(self, obs: Any, state: Any = None, steps: torch.Tensor | None = None) -> torch.Tensor:
        """Return the critic's values of rows, or of the valid steps of sequences, shape (n,)."""
        rows: Any = _Observed(obs)
        tensors, _ = self.policy.observations(rows)
        output = call_network(self.critic, tensors, state)[0]
        values: torch.Tensor = (output if steps is None else output[steps]).flatten()
        return values

    # Minibatches

    def _evaluate_minibatches(self, batch: Batch, batch_size: int | None) -> Evaluated:
        if state_of(batch) is not None:
            yield from self._evaluate_sequences(batch, batch_size)
            return
        for rows in self._minibatches(batch, batch_size, [name for name in _MINIBATCH_COLUMNS if name in batch]):
            yield rows, self.policy.distribution(rows)[0], self._values(rows.obs)

    def _evaluate_sequences(self, batch: Batch, batch_size: int | None) -> Evaluated:
        """Evaluate minibatches of complete sequences.

        A minibatch contains as many sequences as fit into `batch_size` steps, but at least one sequence.
        """
        lengths = chop(np.flatnonzero(batch.starts_episode), len(batch), self.sequence_length)
        starts = lengths.cumsum() - lengths
        order = torch.randperm(len(lengths)).numpy()
        offsets = np.arange(lengths.max())
        columns = Batch({name: batch[name] for name in _MINIBATCH_COLUMNS if name in batch})
        for part in pack(lengths[order], batch_size or len(batch)):
            start = starts[order[part]][:, None]
            is_valid = offsets < lengths[order[part]][:, None]
            # Padded steps repeat the first row of the sequence.
            indices = torch.from_numpy(np.where(is_valid, start + offsets, start))
            steps, state = torch.from_numpy(is_valid), state_of(batch[indices[:, 0]])
            obs = columns[indices].obs
            dist, _ = self.policy.distribution(Batch(obs=obs), state, steps)
            yield columns[indices[steps]], dist, self._values(obs, state, steps)

    def _mark_episode_starts(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        """Add the column `starts_episode`: whether a row is the first row of its episode in the buffer.

        Raises ColumnNotFoundError if the policy is recurrent and the rows have no states.
        """
        if self._is_recurrent and state_of(batch) is None:
            raise ColumnNotFoundError(
                "rows of a recurrent policy must have a column 'state_in' or 'state_in_0', the state before each step, "
                "as Collector stores it; got neither"
            )
        batch.starts_episode = buffer.prev(indices) == indices
        return batch

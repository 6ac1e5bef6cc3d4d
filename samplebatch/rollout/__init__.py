"""Public API of environments, policies, collectors and workers, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.env.agents import Episode as Episode
    from samplebatch.env.atari import make_atari as make_atari
    from samplebatch.env.registry import make_environment as make_environment
    from samplebatch.policy.as_policy import PolicyAdapter as PolicyAdapter
    from samplebatch.policy.as_policy import as_policy as as_policy
    from samplebatch.policy.random import RandomPolicy as RandomPolicy
    from samplebatch.policy.source import load_policy as load_policy
    from samplebatch.rollout.aggregator import Aggregator as Aggregator
    from samplebatch.rollout.async_collector import AsyncCollector as AsyncCollector
    from samplebatch.rollout.collector import Collector as Collector
    from samplebatch.rollout.collector import RemoteBuffer as RemoteBuffer
    from samplebatch.rollout.followed_weights import PublishedWeightsSource as PublishedWeightsSource
    from samplebatch.rollout.followed_weights import WeightsPublication as WeightsPublication
    from samplebatch.rollout.followed_weights import WeightsSubscription as WeightsSubscription
    from samplebatch.rollout.multi_agent_collector import MultiAgentCollector as MultiAgentCollector
    from samplebatch.rollout.postprocessing import GAE as GAE
    from samplebatch.rollout.postprocessing import NStepReturns as NStepReturns
    from samplebatch.rollout.postprocessing import Trajectory as Trajectory
    from samplebatch.rollout.postprocessing import postprocess as postprocess
    from samplebatch.rollout.recorder import EpisodeHook as EpisodeHook
    from samplebatch.rollout.recorder import StepHook as StepHook
    from samplebatch.rollout.statistics import CollectStats as CollectStats
    from samplebatch.rollout.statistics import EpisodeStatistics as EpisodeStatistics
    from samplebatch.rollout.statistics import PolicyStatistics as PolicyStatistics
    from samplebatch.rollout.statistics import SequenceSummaryStats as SequenceSummaryStats
    from samplebatch.rollout.statistics import episode_statistics as episode_statistics
    from samplebatch.workers.pool import WorkerFailure as WorkerFailure
    from samplebatch.workers.pool import WorkerStats as WorkerStats
    from samplebatch.workers.ray_backend import RayOptions as RayOptions
    from samplebatch.workers.workers import RolloutWorkers as RolloutWorkers

__getattr__, __dir__, __all__ = exports(__name__)

"""Reinforcement-learning experience as columns in Arrow memory, moved without copies from environment to learner.

The names below are loaded when they are first used, so importing the package costs little more than NumPy and pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

__version__ = "0.1.0"

_HOMES = {
    "SampleBatch": "samplebatch.batch.sample_batch",
    "MultiAgentBatch": "samplebatch.batch.multi_agent",
    "ViewRequirement": "samplebatch.batch.view_requirement",
    "concat_samples": "samplebatch.batch.concat",
    "concat_samples_into_ma_batch": "samplebatch.batch.concat",
    "attempt_count_timesteps": "samplebatch.batch.rllib",
    "convert_ma_batch_to_sample_batch": "samplebatch.batch.rllib",
    "SampleBatchBuilder": "samplebatch.batch.builder",
    "MultiAgentBatchBuilder": "samplebatch.batch.multi_agent_builder",
    "Batch": "samplebatch.batch.nested.batch",
    "to_numpy": "samplebatch.batch.nested.functions",
    "to_torch": "samplebatch.batch.nested.functions",
    "to_torch_as": "samplebatch.batch.nested.functions",
    "get_sliced_dist": "samplebatch.batch.nested.distributions",
    "get_len_of_dist": "samplebatch.batch.nested.distributions",
    "dist_to_atleast_2d": "samplebatch.batch.nested.distributions",
    "collate": "samplebatch.batch.nested.functions",
    "PrioritizedReplayBuffer": "samplebatch.buffer.prioritized",
    "PrioritizedReplayBufferManager": "samplebatch.buffer.prioritized",
    "PrioritizedVectorReplayBuffer": "samplebatch.buffer.prioritized",
    "SegmentTree": "samplebatch.buffer.sum_tree",
    "ReplayBuffer": "samplebatch.buffer.replay",
    "ReplayBufferManager": "samplebatch.buffer.vector",
    "VectorReplayBuffer": "samplebatch.buffer.vector",
    "CachedReplayBuffer": "samplebatch.buffer.cached",
    "HERReplayBuffer": "samplebatch.buffer.hindsight",
    "HERReplayBufferManager": "samplebatch.buffer.hindsight",
    "HERVectorReplayBuffer": "samplebatch.buffer.hindsight",
    "MultiAgentReplayBuffer": "samplebatch.buffer.multi_agent",
    "DEFAULT_POLICY_ID": "samplebatch.names",
    "channel": "samplebatch.transport.channel",
    "broadcast": "samplebatch.transport.broadcast",
    "gather": "samplebatch.transport.gather",
    "load": "samplebatch.storage.saving",
    "Producer": "samplebatch.transport.producer",
    "Consumer": "samplebatch.transport.consumer",
    "Publisher": "samplebatch.transport.publisher",
    "Subscription": "samplebatch.transport.subscription",
    "read_arrow": "samplebatch.storage.arrow_file",
    "write_arrow": "samplebatch.storage.arrow_file",
    "read_parquet": "samplebatch.storage.parquet",
    "write_parquet": "samplebatch.storage.parquet",
    "Dataset": "samplebatch.storage.dataset",
    "DatasetBatches": "samplebatch.storage.dataset_batches",
    "MixedIndices": "samplebatch.storage.mixed_sampler",
    "MixedSampler": "samplebatch.storage.mixed_sampler",
    "verify": "samplebatch.storage.verifying",
    "FileReport": "samplebatch.storage.verifying",
    "to_hdf5": "samplebatch.storage.hdf5",
    "from_hdf5": "samplebatch.storage.hdf5",
    "enable_shared_pickling": "samplebatch.transport.shared_pickling",
    "disable_shared_pickling": "samplebatch.transport.shared_pickling",
    "Collector": "samplebatch.rollout.collector",
    "AsyncCollector": "samplebatch.rollout.async_collector",
    "CollectStats": "samplebatch.rollout.collect_statistics",
    "RandomPolicy": "samplebatch.policy.random",
    "as_policy": "samplebatch.policy.as_policy",
    "MultiAgentCollector": "samplebatch.rollout.multi_agent_collector",
    "RolloutWorkers": "samplebatch.workers.workers",
    "Aggregator": "samplebatch.rollout.aggregator",
    "postprocess": "samplebatch.rollout.postprocessing",
    "Trajectory": "samplebatch.rollout.trajectories",
    "GAE": "samplebatch.rollout.advantages",
    "NStepReturns": "samplebatch.rollout.advantages",
    "episode_statistics": "samplebatch.rollout.statistics",
    "SampleBatchError": "samplebatch.errors",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from samplebatch.batch.builder import SampleBatchBuilder as SampleBatchBuilder
    from samplebatch.batch.concat import concat_samples as concat_samples
    from samplebatch.batch.concat import concat_samples_into_ma_batch as concat_samples_into_ma_batch
    from samplebatch.batch.multi_agent import MultiAgentBatch as MultiAgentBatch
    from samplebatch.batch.multi_agent_builder import MultiAgentBatchBuilder as MultiAgentBatchBuilder
    from samplebatch.batch.nested.batch import Batch as Batch
    from samplebatch.batch.nested.distributions import dist_to_atleast_2d as dist_to_atleast_2d
    from samplebatch.batch.nested.distributions import get_len_of_dist as get_len_of_dist
    from samplebatch.batch.nested.distributions import get_sliced_dist as get_sliced_dist
    from samplebatch.batch.nested.functions import collate as collate
    from samplebatch.batch.nested.functions import to_numpy as to_numpy
    from samplebatch.batch.nested.functions import to_torch as to_torch
    from samplebatch.batch.nested.functions import to_torch_as as to_torch_as
    from samplebatch.batch.rllib import attempt_count_timesteps as attempt_count_timesteps
    from samplebatch.batch.rllib import convert_ma_batch_to_sample_batch as convert_ma_batch_to_sample_batch
    from samplebatch.batch.sample_batch import SampleBatch as SampleBatch
    from samplebatch.batch.view_requirement import ViewRequirement as ViewRequirement
    from samplebatch.buffer.cached import CachedReplayBuffer as CachedReplayBuffer
    from samplebatch.buffer.hindsight import HERReplayBuffer as HERReplayBuffer
    from samplebatch.buffer.hindsight import HERReplayBufferManager as HERReplayBufferManager
    from samplebatch.buffer.hindsight import HERVectorReplayBuffer as HERVectorReplayBuffer
    from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer as MultiAgentReplayBuffer
    from samplebatch.buffer.prioritized import PrioritizedReplayBuffer as PrioritizedReplayBuffer
    from samplebatch.buffer.prioritized import PrioritizedReplayBufferManager as PrioritizedReplayBufferManager
    from samplebatch.buffer.prioritized import PrioritizedVectorReplayBuffer as PrioritizedVectorReplayBuffer
    from samplebatch.buffer.replay import ReplayBuffer as ReplayBuffer
    from samplebatch.buffer.sum_tree import SegmentTree as SegmentTree
    from samplebatch.buffer.vector import ReplayBufferManager as ReplayBufferManager
    from samplebatch.buffer.vector import VectorReplayBuffer as VectorReplayBuffer
    from samplebatch.errors import SampleBatchError as SampleBatchError
    from samplebatch.names import DEFAULT_POLICY_ID as DEFAULT_POLICY_ID
    from samplebatch.policy.as_policy import as_policy as as_policy
    from samplebatch.policy.random import RandomPolicy as RandomPolicy
    from samplebatch.rollout.advantages import GAE as GAE
    from samplebatch.rollout.advantages import NStepReturns as NStepReturns
    from samplebatch.rollout.aggregator import Aggregator as Aggregator
    from samplebatch.rollout.async_collector import AsyncCollector as AsyncCollector
    from samplebatch.rollout.collect_statistics import CollectStats as CollectStats
    from samplebatch.rollout.collector import Collector as Collector
    from samplebatch.rollout.multi_agent_collector import MultiAgentCollector as MultiAgentCollector
    from samplebatch.rollout.postprocessing import postprocess as postprocess
    from samplebatch.rollout.statistics import episode_statistics as episode_statistics
    from samplebatch.rollout.trajectories import Trajectory as Trajectory
    from samplebatch.storage.arrow_file import read_arrow as read_arrow
    from samplebatch.storage.arrow_file import write_arrow as write_arrow
    from samplebatch.storage.dataset import Dataset as Dataset
    from samplebatch.storage.dataset_batches import DatasetBatches as DatasetBatches
    from samplebatch.storage.hdf5 import from_hdf5 as from_hdf5
    from samplebatch.storage.hdf5 import to_hdf5 as to_hdf5
    from samplebatch.storage.mixed_sampler import MixedIndices as MixedIndices
    from samplebatch.storage.mixed_sampler import MixedSampler as MixedSampler
    from samplebatch.storage.parquet import read_parquet as read_parquet
    from samplebatch.storage.parquet import write_parquet as write_parquet
    from samplebatch.storage.saving import load as load
    from samplebatch.storage.verifying import FileReport as FileReport
    from samplebatch.storage.verifying import verify as verify
    from samplebatch.transport.broadcast import broadcast as broadcast
    from samplebatch.transport.channel import channel as channel
    from samplebatch.transport.consumer import Consumer as Consumer
    from samplebatch.transport.gather import gather as gather
    from samplebatch.transport.producer import Producer as Producer
    from samplebatch.transport.publisher import Publisher as Publisher
    from samplebatch.transport.shared_pickling import disable_shared_pickling as disable_shared_pickling
    from samplebatch.transport.shared_pickling import enable_shared_pickling as enable_shared_pickling
    from samplebatch.transport.subscription import Subscription as Subscription
    from samplebatch.workers.workers import RolloutWorkers as RolloutWorkers

__getattr__, __dir__ = exports(__name__, _HOMES, "__version__")

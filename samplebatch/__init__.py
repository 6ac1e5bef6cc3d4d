"""Reinforcement-learning experience as columns in Arrow memory, moved without copies from environment to learner.

Public names are imported on first use, so importing the package is hardly slower than importing NumPy and pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from samplebatch.batch.action_unit import ActionUnit as ActionUnit
    from samplebatch.batch.builder import MultiAgentBatchBuilder as MultiAgentBatchBuilder
    from samplebatch.batch.builder import SampleBatchBuilder as SampleBatchBuilder
    from samplebatch.batch.concat import attempt_count_timesteps as attempt_count_timesteps
    from samplebatch.batch.concat import concat_samples as concat_samples
    from samplebatch.batch.concat import concat_samples_into_ma_batch as concat_samples_into_ma_batch
    from samplebatch.batch.concat import convert_ma_batch_to_sample_batch as convert_ma_batch_to_sample_batch
    from samplebatch.batch.multi_agent import MultiAgentBatch as MultiAgentBatch
    from samplebatch.batch.nested.batch import Batch as Batch
    from samplebatch.batch.nested.distributions import dist_to_atleast_2d as dist_to_atleast_2d
    from samplebatch.batch.nested.distributions import get_len_of_dist as get_len_of_dist
    from samplebatch.batch.nested.distributions import get_sliced_dist as get_sliced_dist
    from samplebatch.batch.nested.functions import collate as collate
    from samplebatch.batch.nested.functions import to_numpy as to_numpy
    from samplebatch.batch.nested.functions import to_torch as to_torch
    from samplebatch.batch.nested.functions import to_torch_as as to_torch_as
    from samplebatch.batch.sample_batch import SampleBatch as SampleBatch
    from samplebatch.batch.view_requirement import ViewRequirement as ViewRequirement
    from samplebatch.buffer.hindsight import HERReplayBuffer as HERReplayBuffer
    from samplebatch.buffer.hindsight import HERReplayBufferManager as HERReplayBufferManager
    from samplebatch.buffer.hindsight import HERVectorReplayBuffer as HERVectorReplayBuffer
    from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer as MultiAgentReplayBuffer
    from samplebatch.buffer.prioritized import PrioritizedReplayBuffer as PrioritizedReplayBuffer
    from samplebatch.buffer.prioritized import PrioritizedReplayBufferManager as PrioritizedReplayBufferManager
    from samplebatch.buffer.prioritized import PrioritizedVectorReplayBuffer as PrioritizedVectorReplayBuffer
    from samplebatch.buffer.replay import ReplayBuffer as ReplayBuffer
    from samplebatch.buffer.reservoir import ReservoirReplayBuffer as ReservoirReplayBuffer
    from samplebatch.buffer.samplers import Sample as Sample
    from samplebatch.buffer.sum_tree import SegmentTree as SegmentTree
    from samplebatch.buffer.vector import CachedReplayBuffer as CachedReplayBuffer
    from samplebatch.buffer.vector import ListReplayBuffer as ListReplayBuffer
    from samplebatch.buffer.vector import ReplayBufferManager as ReplayBufferManager
    from samplebatch.buffer.vector import VectorReplayBuffer as VectorReplayBuffer
    from samplebatch.errors import SampleBatchError as SampleBatchError
    from samplebatch.names import DEFAULT_POLICY_ID as DEFAULT_POLICY_ID
    from samplebatch.policy.as_policy import as_policy as as_policy
    from samplebatch.policy.random import RandomPolicy as RandomPolicy
    from samplebatch.rollout.aggregator import Aggregator as Aggregator
    from samplebatch.rollout.async_collector import AsyncCollector as AsyncCollector
    from samplebatch.rollout.collector import Collector as Collector
    from samplebatch.rollout.multi_agent_collector import MultiAgentCollector as MultiAgentCollector
    from samplebatch.rollout.postprocessing import GAE as GAE
    from samplebatch.rollout.postprocessing import NStepReturns as NStepReturns
    from samplebatch.rollout.postprocessing import Trajectory as Trajectory
    from samplebatch.rollout.postprocessing import postprocess as postprocess
    from samplebatch.rollout.statistics import CollectStats as CollectStats
    from samplebatch.rollout.statistics import episode_statistics as episode_statistics
    from samplebatch.storage.datasets.dataset import Dataset as Dataset
    from samplebatch.storage.datasets.dataset import DatasetBatches as DatasetBatches
    from samplebatch.storage.datasets.mixed_sampler import MixedIndices as MixedIndices
    from samplebatch.storage.datasets.mixed_sampler import MixedSampler as MixedSampler
    from samplebatch.storage.hdf5 import from_hdf5 as from_hdf5
    from samplebatch.storage.hdf5 import to_hdf5 as to_hdf5
    from samplebatch.storage.saving import FileReport as FileReport
    from samplebatch.storage.saving import load as load
    from samplebatch.storage.saving import verify as verify
    from samplebatch.storage.tables.arrow import read_arrow as read_arrow
    from samplebatch.storage.tables.arrow import write_arrow as write_arrow
    from samplebatch.storage.tables.parquet import read_parquet as read_parquet
    from samplebatch.storage.tables.parquet import write_parquet as write_parquet
    from samplebatch.transport.broadcast import Publisher as Publisher
    from samplebatch.transport.broadcast import Subscription as Subscription
    from samplebatch.transport.broadcast import broadcast as broadcast
    from samplebatch.transport.channel import channel as channel
    from samplebatch.transport.consumer import Consumer as Consumer
    from samplebatch.transport.gather import gather as gather
    from samplebatch.transport.producer import Producer as Producer
    from samplebatch.transport.shared_pickling import disable_shared_pickling as disable_shared_pickling
    from samplebatch.transport.shared_pickling import enable_shared_pickling as enable_shared_pickling
    from samplebatch.workers.workers import RolloutWorkers as RolloutWorkers

__getattr__, __dir__, __all__ = exports(__name__, "__version__")

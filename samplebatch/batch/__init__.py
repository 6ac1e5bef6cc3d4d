"""Flat and nested batches of named columns with equal length.

Public names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.batch.action_unit import ActionUnit as ActionUnit
    from samplebatch.batch.builder import MultiAgentBatchBuilder as MultiAgentBatchBuilder
    from samplebatch.batch.builder import SampleBatchBuilder as SampleBatchBuilder
    from samplebatch.batch.concat import attempt_count_timesteps as attempt_count_timesteps
    from samplebatch.batch.concat import concat_samples as concat_samples
    from samplebatch.batch.concat import concat_samples_into_ma_batch as concat_samples_into_ma_batch
    from samplebatch.batch.concat import convert_ma_batch_to_sample_batch as convert_ma_batch_to_sample_batch
    from samplebatch.batch.flags import Flags as Flags
    from samplebatch.batch.multi_agent import MultiAgentBatch as MultiAgentBatch
    from samplebatch.batch.nested.batch import Batch as Batch
    from samplebatch.batch.nested.distributions import dist_to_atleast_2d as dist_to_atleast_2d
    from samplebatch.batch.nested.distributions import get_len_of_dist as get_len_of_dist
    from samplebatch.batch.nested.distributions import get_sliced_dist as get_sliced_dist
    from samplebatch.batch.nested.functions import collate as collate
    from samplebatch.batch.nested.functions import to_numpy as to_numpy
    from samplebatch.batch.nested.functions import to_torch as to_torch
    from samplebatch.batch.nested.functions import to_torch_as as to_torch_as
    from samplebatch.batch.nested.typed import ActBatch as ActBatch
    from samplebatch.batch.nested.typed import AdvantagesBatch as AdvantagesBatch
    from samplebatch.batch.nested.typed import AnyBatch as AnyBatch
    from samplebatch.batch.nested.typed import DistributionBatch as DistributionBatch
    from samplebatch.batch.nested.typed import LogpOldBatch as LogpOldBatch
    from samplebatch.batch.nested.typed import ModelOutputBatch as ModelOutputBatch
    from samplebatch.batch.nested.typed import ObsBatch as ObsBatch
    from samplebatch.batch.nested.typed import PrioritizedBatch as PrioritizedBatch
    from samplebatch.batch.nested.typed import RecurrentStateBatch as RecurrentStateBatch
    from samplebatch.batch.nested.typed import ReturnsBatch as ReturnsBatch
    from samplebatch.batch.nested.typed import RolloutBatch as RolloutBatch
    from samplebatch.batch.sample_batch import SampleBatch as SampleBatch
    from samplebatch.batch.view_requirement import ViewRequirement as ViewRequirement

__getattr__, __dir__, __all__ = exports(__name__)

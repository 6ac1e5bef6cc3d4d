"""Conversion of experience from and to other libraries; each module is imported on first use.

A function `to_x` accepts a batch, a buffer, columns by name or an iterable of fragments; a function `from_x` returns a
`SampleBatch`. Each function imports the library that it requires; if the library is not installed, the error names the
extra to install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.convert.cleanrl import CleanRLReplayBuffer as CleanRLReplayBuffer
    from samplebatch.convert.cleanrl import TransitionSamples as TransitionSamples
    from samplebatch.convert.cpprb import from_cpprb as from_cpprb
    from samplebatch.convert.cpprb import to_cpprb as to_cpprb
    from samplebatch.convert.d4rl import read_d4rl as read_d4rl
    from samplebatch.convert.d4rl import write_d4rl as write_d4rl
    from samplebatch.convert.jax import register_with_jax as register_with_jax
    from samplebatch.convert.lerobot import read_lerobot as read_lerobot
    from samplebatch.convert.lerobot import write_lerobot as write_lerobot
    from samplebatch.convert.minari import episodes_from_minari as episodes_from_minari
    from samplebatch.convert.minari import from_minari as from_minari
    from samplebatch.convert.minari import to_minari as to_minari
    from samplebatch.convert.rlds import from_rlds as from_rlds
    from samplebatch.convert.rlds import to_rlds as to_rlds
    from samplebatch.convert.rllib import from_ray_dataset as from_ray_dataset
    from samplebatch.convert.rllib import from_rllib_episodes as from_rllib_episodes
    from samplebatch.convert.rllib import read_rllib_json as read_rllib_json
    from samplebatch.convert.rllib import read_rllib_parquet as read_rllib_parquet
    from samplebatch.convert.rllib import to_ray_dataset as to_ray_dataset
    from samplebatch.convert.rllib import to_rllib_episodes as to_rllib_episodes
    from samplebatch.convert.rllib import write_rllib_episodes as write_rllib_episodes
    from samplebatch.convert.rllib import write_rllib_json as write_rllib_json
    from samplebatch.convert.rllib import write_rllib_parquet as write_rllib_parquet
    from samplebatch.convert.sb3 import RolloutSamples as RolloutSamples
    from samplebatch.convert.sb3 import SB3HerReplayBuffer as SB3HerReplayBuffer
    from samplebatch.convert.sb3 import SB3ReplayBuffer as SB3ReplayBuffer
    from samplebatch.convert.sb3 import SB3RolloutBuffer as SB3RolloutBuffer
    from samplebatch.convert.sb3 import from_sb3 as from_sb3
    from samplebatch.convert.sb3 import to_sb3_replay as to_sb3_replay
    from samplebatch.convert.sb3 import to_sb3_rollout as to_sb3_rollout
    from samplebatch.convert.tianshou import from_tianshou as from_tianshou
    from samplebatch.convert.tianshou import to_tianshou as to_tianshou
    from samplebatch.convert.token_dataset import from_dicts as from_dicts
    from samplebatch.convert.token_dataset import from_token_dataset as from_token_dataset
    from samplebatch.convert.token_dataset import to_dicts as to_dicts
    from samplebatch.convert.token_dataset import to_token_dataset as to_token_dataset
    from samplebatch.convert.torchrl import TorchRLReplayBuffer as TorchRLReplayBuffer
    from samplebatch.convert.torchrl import from_tensordict as from_tensordict
    from samplebatch.convert.torchrl import to_tensordict as to_tensordict
    from samplebatch.convert.verl import from_verl as from_verl
    from samplebatch.convert.verl import to_verl as to_verl

__getattr__, __dir__, __all__ = exports(__name__)

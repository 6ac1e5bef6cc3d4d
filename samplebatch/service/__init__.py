"""Replay beyond one machine: buffers behind Arrow Flight, for many writers and many learners.

Every public name of the replay service and its clients, loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

_HOMES = {
    "Checkpoint": "samplebatch.service.checkpoint",
    "Checkpoints": "samplebatch.service.checkpoint",
    "InsertResult": "samplebatch.service.items",
    "MetricsServer": "samplebatch.service.metrics",
    "RateLimiter": "samplebatch.service.limiter",
    "ReplayClient": "samplebatch.service.client",
    "ReplayServer": "samplebatch.service.server",
    "ReplayTable": "samplebatch.service.table",
    "Sample": "samplebatch.service.items",
    "ShardedReplayClient": "samplebatch.service.sharded_client",
    "WriteCounts": "samplebatch.service.writing",
    "parse_table": "samplebatch.service.table_spec",
    "render_metrics": "samplebatch.service.metrics",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from samplebatch.service.checkpoint import Checkpoint as Checkpoint
    from samplebatch.service.checkpoint import Checkpoints as Checkpoints
    from samplebatch.service.client import ReplayClient as ReplayClient
    from samplebatch.service.items import InsertResult as InsertResult
    from samplebatch.service.items import Sample as Sample
    from samplebatch.service.limiter import RateLimiter as RateLimiter
    from samplebatch.service.metrics import MetricsServer as MetricsServer
    from samplebatch.service.metrics import render_metrics as render_metrics
    from samplebatch.service.server import ReplayServer as ReplayServer
    from samplebatch.service.sharded_client import ShardedReplayClient as ShardedReplayClient
    from samplebatch.service.table import ReplayTable as ReplayTable
    from samplebatch.service.table_spec import parse_table as parse_table
    from samplebatch.service.writing import WriteCounts as WriteCounts

__getattr__, __dir__ = exports(__name__, _HOMES)

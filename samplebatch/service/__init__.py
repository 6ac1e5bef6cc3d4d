"""Replay service: experience tables that many writers and learners access over Arrow Flight.

Public names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.service.checkpoint import Checkpoints as Checkpoints
    from samplebatch.service.client import ReplayClient as ReplayClient
    from samplebatch.service.items import Sample as Sample
    from samplebatch.service.limiter import RateLimiter as RateLimiter
    from samplebatch.service.remote_actors import RemoteActors as RemoteActors
    from samplebatch.service.row_client import RowClient as RowClient
    from samplebatch.service.row_table import RowTable as RowTable
    from samplebatch.service.server import MetricsServer as MetricsServer
    from samplebatch.service.server import ReplayServer as ReplayServer
    from samplebatch.service.table import ReplayTable as ReplayTable
    from samplebatch.service.table import parse_table as parse_table
    from samplebatch.service.weights import PublishedWeights as PublishedWeights

__getattr__, __dir__, __all__ = exports(__name__)

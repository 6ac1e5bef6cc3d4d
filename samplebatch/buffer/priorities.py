"""The name under which older pickles have the sampler of prioritized buffers."""

from __future__ import annotations

from samplebatch.buffer.samplers import Prioritized as Prioritized

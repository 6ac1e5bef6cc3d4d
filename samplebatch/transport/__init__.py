"""Channels and broadcasts of batches between processes, in shared memory.

Classes of this package are imported on first use. `samplebatch.channel`, `samplebatch.gather` and
`samplebatch.broadcast` create instances of the package's classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.transport.broadcast import Publication as Publication
    from samplebatch.transport.broadcast import Publisher as Publisher
    from samplebatch.transport.broadcast import Subscription as Subscription
    from samplebatch.transport.consumer import Consumer as Consumer
    from samplebatch.transport.gather import Gathering as Gathering
    from samplebatch.transport.producer import Producer as Producer
    from samplebatch.transport.producer import Reservation as Reservation

__getattr__, __dir__, __all__ = exports(__name__)

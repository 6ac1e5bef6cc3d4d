"""Between processes: batches handed over in shared memory.

The classes of channels and broadcasts, loaded when they are first used. `samplebatch.channel`, `samplebatch.gather` and
`samplebatch.broadcast` make them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

_HOMES = {
    "Producer": "samplebatch.transport.producer",
    "Reservation": "samplebatch.transport.reservation",
    "Consumer": "samplebatch.transport.consumer",
    "Gathering": "samplebatch.transport.gather",
    "Publisher": "samplebatch.transport.publisher",
    "Subscription": "samplebatch.transport.subscription",
    "Publication": "samplebatch.transport.subscription",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from samplebatch.transport.consumer import Consumer as Consumer
    from samplebatch.transport.gather import Gathering as Gathering
    from samplebatch.transport.producer import Producer as Producer
    from samplebatch.transport.publisher import Publisher as Publisher
    from samplebatch.transport.reservation import Reservation as Reservation
    from samplebatch.transport.subscription import Publication as Publication
    from samplebatch.transport.subscription import Subscription as Subscription

__getattr__, __dir__ = exports(__name__, _HOMES)

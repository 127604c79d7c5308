"""The words that Aqua's processes share: ids, units, errors, state machines, wire messages.

Everything here is pure, no sockets, no clocks, no threads, but for `supervision`, which every
distribution needs and none owns. The coordinator, aqualib, the placer
and the simulator follow these tables and speak these messages; nothing else connects them.

Modules, from the ground up:

- `errors`, `units`, `ids`: the vocabulary.
- `machine`, `lease`, `slab`: who may do what when, as tables.
- `wire`, `leases`, `members`, `batches`: REST messages, and `bearer`, how they show a token.
- `channel`, `capability`: what a consumer and a producer say to each other.
- `profile`, `problem`, `plan`, `prediction`: what profiler, placer and simulator write and read.
- `hardware`, `decoders`: the GPUs and models that planners know by name.
- `findings`: what `aqua doctor` asks and hears.
- `settings`: how environment variables are read, and what is said of those that are wrong.
- `supervision`: the one helper that runs threads and tasks, and starts them again when they crash.

Here are the names that most distributions need; the others come from their modules.
"""

from __future__ import annotations

from aqua_protocol.errors import (
    AquaError,
    CapacityError,
    ChecksumMismatchError,
    ConfigError,
    DataLostError,
    ErrorBody,
    LeaseLostError,
    ProtocolError,
    RequestInvalidError,
    SocketPathTooLongError,
    TransportError,
    TransportUnavailableError,
    UnavailableError,
    UnknownResourceError,
)
from aqua_protocol.lease import LeaseState
from aqua_protocol.units import DEFAULT_SLAB_BYTES, GIB, KIB, MIB, format_bytes, parse_bytes
from aqua_protocol.wire import PROTOCOL_VERSION, TransportKind, require_protocol_version

__all__ = [
    "DEFAULT_SLAB_BYTES",
    "GIB",
    "KIB",
    "MIB",
    "PROTOCOL_VERSION",
    "AquaError",
    "CapacityError",
    "ChecksumMismatchError",
    "ConfigError",
    "DataLostError",
    "ErrorBody",
    "LeaseLostError",
    "LeaseState",
    "ProtocolError",
    "RequestInvalidError",
    "SocketPathTooLongError",
    "TransportError",
    "TransportKind",
    "TransportUnavailableError",
    "UnavailableError",
    "UnknownResourceError",
    "format_bytes",
    "parse_bytes",
    "require_protocol_version",
]

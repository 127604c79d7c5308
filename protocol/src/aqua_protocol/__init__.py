"""The words that Aqua's processes share: ids, units, errors, state machines, wire messages.

Everything here is pure: no sockets, no clocks, no threads. The coordinator, aqualib, the placer
and the simulator follow these tables and speak these messages; nothing else connects them.

Modules, from the ground up:

- `errors`, `units`, `ids`: the vocabulary.
- `machine`, `lease`, `slab`: who may do what when, as tables.
- `wire`, `leases`, `members`: REST messages.
- `channel`, `capability`: what a consumer and a producer say to each other.
- `profile`, `problem`, `plan`: what the profiler and the placer write and read.
- `hardware`, `decoders`: the GPUs and models that planners know by name.
- `findings`: what `aqua doctor` asks and hears.
"""

from __future__ import annotations

from aqua_protocol.errors import (
    AquaError,
    BooksRebuildingError,
    CapabilityError,
    CapacityError,
    ChecksumMismatchError,
    ConfigError,
    DataLostError,
    ErrorBody,
    ForbiddenError,
    LeaseLostError,
    MethodNotAllowedError,
    ProtocolError,
    RequestInvalidError,
    RequestTooLargeError,
    SocketPathTooLongError,
    StoreFullError,
    StoreUnavailableError,
    TransportError,
    TransportUnavailableError,
    UnauthenticatedError,
    UnavailableError,
    UnknownResourceError,
    VersionMismatchError,
    error_from_body,
)
from aqua_protocol.lease import LeaseState
from aqua_protocol.slab import HELD_STATES, SLAB, SlabEvent, SlabState
from aqua_protocol.units import DEFAULT_SLAB_BYTES, GIB, KIB, MIB, format_bytes, parse_bytes
from aqua_protocol.wire import PROTOCOL_VERSION, TransportKind, require_protocol_version

__all__ = [
    "DEFAULT_SLAB_BYTES",
    "GIB",
    "HELD_STATES",
    "KIB",
    "MIB",
    "PROTOCOL_VERSION",
    "SLAB",
    "AquaError",
    "BooksRebuildingError",
    "CapabilityError",
    "CapacityError",
    "ChecksumMismatchError",
    "ConfigError",
    "DataLostError",
    "ErrorBody",
    "ForbiddenError",
    "LeaseLostError",
    "LeaseState",
    "MethodNotAllowedError",
    "ProtocolError",
    "RequestInvalidError",
    "RequestTooLargeError",
    "SlabEvent",
    "SlabState",
    "SocketPathTooLongError",
    "StoreFullError",
    "StoreUnavailableError",
    "TransportError",
    "TransportKind",
    "TransportUnavailableError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownResourceError",
    "VersionMismatchError",
    "error_from_body",
    "format_bytes",
    "parse_bytes",
    "require_protocol_version",
]

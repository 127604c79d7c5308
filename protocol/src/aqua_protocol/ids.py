"""Names of things: distinct types, one grammar, fixed lengths.

A producer and a consumer name themselves (`llm-0.node-3`), so that books rebuild under the same
names after a loss. Leases are named by the coordinator, at random: no member can name one before it
is granted.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Final, NewType

from pydantic import Field

ProducerId = NewType("ProducerId", str)
ConsumerId = NewType("ConsumerId", str)
LeaseId = NewType("LeaseId", str)
ReclaimId = NewType("ReclaimId", str)
BooksId = NewType("BooksId", str)
"""Names one life of the coordinator's books; a new value means that the old books were lost."""
Incarnation = NewType("Incarnation", str)
"""Names one life of a member process."""
Epoch = NewType("Epoch", int)
"""Fencing token. Issued by the books from a counter that starts at the Redis time in microseconds
when the books are made, so it grows across losses of the books as well."""
Revision = NewType("Revision", int)
"""Counts a member's reports within one incarnation; an older report never overwrites a newer."""
SlabId = NewType("SlabId", int)
"""Names one physical slab within one producer incarnation; never used twice."""
Generation = NewType("Generation", int)
"""Counts how often a slab was lent; an answer for an older generation is ignored."""

# Characters. A Kubernetes pod name with its namespace takes at most 117 (63 + 1 + 53). Doubled,
# every Redis key and log line may be twice as long.
MAX_NAME_LENGTH: Final = 128
NAME_PATTERN: Final = r"^[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?$"
"""Letters, digits and inner `. _ : -`: safe in URLs, Redis keys, labels and file names."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH, pattern=NAME_PATTERN)]

MAX_EPOCH: Final = (1 << 53) - 1
"""Fixed: the largest integer that JSON, JavaScript and Lua hold exactly."""


def new_incarnation() -> Incarnation:
    """A fresh random name for this life of a process (96 bits)."""
    return Incarnation(secrets.token_hex(12))


def new_idempotency_key() -> str:
    """A fresh random key for one mutation, to be repeated only when that mutation is retried."""
    return secrets.token_hex(16)

"""What a Redis must be like to keep the books.

One that cannot keep them is refused. One that may lose what was acknowledged is refused in
production and warned of elsewhere, unless the loss is accepted by name (ADR 0022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from aqua_coordinator.embedded import Fsync
from aqua_protocol.findings import Finding, FindingLevel

if TYPE_CHECKING:
    from aqua_coordinator.settings import CoordinatorSettings

MIN_REDIS_VERSION: Final = (7, 0)
"""First with libraries of functions, whose flags make a refused write refuse the whole script."""
CONFIG_READ: Final = ("appendonly", "appendfsync")
"""What is read of a server's configuration."""


def find_faults(
    info: Mapping[str, str], config: Mapping[str, str], settings: CoordinatorSettings | None
) -> Iterator[Finding]:
    """Say what is wrong with a server, by its INFO and its CONFIG, empty where it does not tell.

    Args:
        settings: What is asked of a server that is not our own.
    """
    warn = FindingLevel.WARN
    bad = FindingLevel.FAIL if settings and settings.production else warn
    version = info.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS_VERSION:
        remedy = "Upgrade it, use Valkey, or unset AQUA_REDIS_URL to run an embedded one."
        message = f"this Redis is {version}, Aqua needs 7.0 or newer"
        yield Finding(check="version", level=FindingLevel.FAIL, message=message, remedy=remedy)
    if info.get("cluster_enabled") == "1":
        message = "Redis Cluster is not supported: the books are one hash slot's anyway"
        remedy = "Use one Redis, with replicas and Sentinels: redis+sentinel://..."
        yield Finding(check="cluster", level=FindingLevel.FAIL, message=message, remedy=remedy)
    policy = info.get("maxmemory_policy", "noeviction")
    if int(info.get("maxmemory", 0)) and policy != "noeviction":
        message = f"this Redis deletes keys when its memory is full (`maxmemory-policy {policy}`)"
        remedy = "Give it `maxmemory-policy noeviction`: what it deletes are leases in use."
        yield Finding(check="eviction", level=FindingLevel.FAIL, message=message, remedy=remedy)
    if settings is None or settings.redis_url is None:
        return
    kept = Fsync(config.get("appendfsync", "no") if config.get("appendonly") == "yes" else "no")
    order, wanted = [*Fsync], settings.required_fsync
    safe = f"`appendonly yes` and `appendfsync {wanted}`"
    if not config and wanted is not Fsync.NO:
        message = "this Redis does not say how it keeps its data"
        remedy = f"See to it that it has {safe}."
        yield Finding(check="fsync", level=warn, message=message, remedy=remedy)
    elif order.index(kept) < order.index(wanted):
        message = "this Redis may lose what it has acknowledged when it dies, or its machine"
        remedy = f"Give it {safe}, or accept the loss by name: AQUA_FSYNC={kept}."
        yield Finding(check="fsync", level=bad, message=message, remedy=remedy)
    count = int(info.get("connected_slaves", 0))
    if count and settings.min_replicas is None:
        message = f"a failover to one of {count} replicas may lose what was acknowledged"
        remedy = f"Set AQUA_MIN_REPLICAS={count}; 0 accepts the loss by name."
        yield Finding(check="replicas", level=bad, message=message, remedy=remedy)

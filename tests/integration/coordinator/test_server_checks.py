"""What Redis a coordinator accepts: refused, warned of, or accepted by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from aqua_coordinator.embedded import Fsync
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store import Ledger, Pipeline, open_pool
from aqua_coordinator.store.server_checks import find_faults
from aqua_protocol import ConfigError
from aqua_protocol.findings import FindingLevel
from harness.bounds import HANG_S
from harness.redis_nodes import RedisNode, free_ports, replicated
from harness.store_servers import short_directory

SAFE = ("appendonly yes", "appendfsync always")
EVERYSEC = ("appendonly yes", "appendfsync everysec")
FORGETFUL = ("appendonly no",)
SILENT = (*EVERYSEC, 'rename-command CONFIG ""')
"""As managed services are."""


@contextmanager
def node_with(*lines: str) -> Iterator[RedisNode]:
    """A server with this configuration."""
    with short_directory() as directory:
        (port,) = free_ports(1)
        node = RedisNode(directory / "node", port).configure("save ''", *lines)
        try:
            node.start()
            yield node
        finally:
            node.kill()


async def open_books(node: RedisNode, **settings: object) -> list[str]:
    """Open the books there; gives the warnings."""
    pipeline = Pipeline(
        open_pool(node.url, connect_timeout_s=HANG_S, max_connections=2), timeout_s=HANG_S
    )
    pipeline.start()
    try:
        with capture_logs() as logs:
            await Ledger(pipeline).open(
                CoordinatorSettings.model_validate({"redis_url": node.url} | settings)
            )
    finally:
        await pipeline.close()
    return [f"{entry['event']}. {entry['remedy']}" for entry in logs]


@pytest.mark.parametrize("lines", [EVERYSEC, FORGETFUL], ids=["everysec", "no log"])
async def test_in_production_a_redis_that_may_forget_answers_is_refused_unless_accepted_by_name(
    lines: tuple[str, ...],
) -> None:
    name = Fsync.EVERYSEC if lines is EVERYSEC else Fsync.NO
    with node_with(*lines) as node:
        with pytest.raises(ConfigError, match="may lose what it has acknowledged") as refused:
            await open_books(node, production=True)
        assert "appendfsync always" in refused.value.remedy
        assert f"AQUA_FSYNC={name}" in refused.value.remedy
        assert await open_books(node, production=True, fsync=name) == []
        stricter = await open_books(node, fsync=Fsync.ALWAYS)
        assert len(stricter) == 1, "elsewhere it is a warning"
        usual = await open_books(node)
        assert len(usual) == (lines is FORGETFUL)


async def test_a_redis_that_keeps_every_answer_is_accepted_in_silence() -> None:
    with node_with(*SAFE) as node:
        assert await open_books(node, production=True) == []


async def test_one_that_does_not_tell_is_warned_of_with_what_it_needs() -> None:
    with node_with(*SILENT) as node:
        (warning,) = await open_books(node, production=True)
        assert "appendfsync always" in warning
        assert await open_books(node, production=True, fsync=Fsync.NO) == []


async def test_cluster_mode_is_refused_by_name_everywhere() -> None:
    (bus,) = free_ports(1)  # By itself it takes one from which the kernel serves connections.
    with node_with(*SAFE, "cluster-enabled yes", f"cluster-port {bus}") as node:
        for production in (False, True):
            with pytest.raises(ConfigError, match="Redis Cluster") as refused:
                await open_books(node, production=production)
            assert "redis+sentinel://" in refused.value.remedy


async def test_replicas_that_writes_do_not_wait_for_are_refused_unless_accepted_by_name() -> None:
    with short_directory() as directory, replicated(directory) as (master, *_):
        accepted = {"production": True, "fsync": Fsync.NO}
        with pytest.raises(ConfigError, match="2 replicas may lose") as refused:
            await open_books(master, **accepted)
        assert "AQUA_MIN_REPLICAS=2" in refused.value.remedy
        (warning,) = await open_books(master, fsync=Fsync.NO)
        assert "AQUA_MIN_REPLICAS=2" in warning
        for count in (0, 2):
            assert await open_books(master, min_replicas=count, **accepted) == []


async def test_a_redis_that_deletes_keys_when_it_is_full_is_refused_with_the_remedy() -> None:
    with node_with(*EVERYSEC) as node:
        node.command("CONFIG", "SET", "maxmemory", "100mb")
        for policy in ("allkeys-lru", "volatile-ttl", "allkeys-random", "volatile-lfu"):
            node.command("CONFIG", "SET", "maxmemory-policy", policy)
            with pytest.raises(ConfigError, match=policy) as refused:
                await open_books(node, fsync=Fsync.NO)
            assert "noeviction" in refused.value.remedy
        node.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        assert await open_books(node) == []
        node.command("CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "allkeys-lru")
        assert await open_books(node) == [], "nothing is deleted without a limit"


async def test_that_it_deletes_keys_is_seen_also_where_config_is_forbidden() -> None:
    with (
        node_with(*SILENT, "maxmemory 100mb", "maxmemory-policy allkeys-lru") as node,
        pytest.raises(ConfigError, match="maxmemory-policy allkeys-lru"),
    ):
        await open_books(node, fsync=Fsync.NO)


def test_too_old_is_refused_whatever_it_says_else() -> None:
    for info in ({"redis_version": "6.2.14"}, {"redis_version": "6.2.14", "cluster_enabled": "1"}):
        fault = next(find_faults(info, {}, None))
        assert fault.level is FindingLevel.FAIL
        assert "needs 7.0" in fault.message


def test_production_needs_tokens_and_an_embedded_store_has_no_replicas(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without authentication"):
        CoordinatorSettings(production=True).require_safe_address()
    CoordinatorSettings(production=True, tokens_file=tmp_path).require_safe_address()
    with pytest.raises(ValueError, match="needs a redis_url"):
        CoordinatorSettings(min_replicas=1)
    assert CoordinatorSettings(production=True).required_fsync is Fsync.ALWAYS
    assert CoordinatorSettings().required_fsync is Fsync.EVERYSEC

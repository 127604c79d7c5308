"""The demo's coordinator: the real command, with its embedded Valkey, as an operator starts it.

Each member gets a token with its role, bound to its name. The port is whichever is free; the
coordinator says which in its log. It keeps its data in a directory that vanishes with the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import httpx

from aqua_demo.processes import Child, Crew, DemoError, clean_environment
from aqua_protocol.leases import PlacementPlan

START_LIMIT_S: Final = 30.0
LOOK_AGAIN_S: Final = 0.05

PRODUCER_ID: Final = "image-service"
CONSUMER_ID: Final = "llm"


@dataclass(frozen=True, slots=True)
class Coordinator:
    """A running coordinator, and the tokens that it accepts."""

    url: str
    producer_token: str
    consumer_token: str
    operator_token: str

    @classmethod
    def start(cls, crew: Crew, scratch: Path) -> Self:
        """Make tokens, start it and wait until it listens.

        Raises:
            DemoError: It is not installed, or did not start; its log is in the message.
        """
        program = Path(sys.executable).with_name("aqua-coordinator")
        if not program.exists():
            raise DemoError(
                f"{program} is not installed",
                remedy="Install it next to aqualib: pip install aqua-demo.",
            )
        tokens_file = scratch / "tokens.json"
        producer_token = _make_token(program, tokens_file, "producer", PRODUCER_ID)
        consumer_token = _make_token(program, tokens_file, "consumer", CONSUMER_ID)
        operator_token = _make_token(program, tokens_file, "operator")
        child = crew.start_service(
            "coordinator",
            [str(program), "serve"],
            {
                "AQUA_LISTEN_PORT": "0",
                "AQUA_DATA_DIR": str(scratch / "coordinator"),
                "AQUA_TOKENS_FILE": str(tokens_file),
            },
        )
        return cls(_address(crew, child), producer_token, consumer_token, operator_token)

    def obey(self, pairings: PlacementPlan) -> None:
        """Have it match as a plan says.

        Raises:
            DemoError: It does not take the plan.
        """
        answer = httpx.put(
            f"{self.url}/v1/placements",
            content=pairings.model_dump_json(),
            headers={
                "Authorization": f"Bearer {self.operator_token}",
                "Content-Type": "application/json",
            },
            timeout=START_LIMIT_S,
        )
        if not answer.is_success:
            raise DemoError(f"the coordinator refuses the plan: {answer.text}")


def _make_token(program: Path, tokens_file: Path, role: str, member: str | None = None) -> str:
    command = [str(program), "token", "--file", str(tokens_file), "--role", role]
    if member is not None:
        command += ["--member", member]
    done = subprocess.run(  # noqa: S603 - our own program, without a shell
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_LIMIT_S,
        env=clean_environment(),
    )
    if done.returncode:
        raise DemoError(f"aqua-coordinator token failed: {done.stderr.strip()}")
    return str(done.stdout).strip()


def _address(crew: Crew, child: Child) -> str:
    """Where it listens, from its log."""
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s:
        for line in child.log.read_text(encoding="utf-8").splitlines():
            if '"listening"' in line:
                return str(json.loads(line)["url"])
        if child.wait(LOOK_AGAIN_S) is not None:
            raise crew.died(child.name)
    raise DemoError(
        f"the coordinator does not listen after {START_LIMIT_S:.0f} s:\n{child.log_tail()}"
    )

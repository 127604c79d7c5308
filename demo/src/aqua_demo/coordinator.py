"""The demo's coordinator: the real command, with its embedded Valkey, as an operator starts it.

Each member gets a token with its role, bound to its name. The port is whichever is free; the
coordinator says which in its log. It keeps its data in a directory that vanishes with the run.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from aqua_client import CoordinatorClient
from aqua_coordinator.tokens import Role, create_token
from aqua_demo.messages import CONSUMER_ID, PRODUCER_ID, SAMPLE_INTERVAL_S
from aqua_demo.processes import Child, DemoError, ProcessGroup
from aqua_protocol.leases import PlacementPlan

START_LIMIT_S: Final = 30.0
"""Seconds for a coordinator and its Valkey to listen. Doubled, a demo whose coordinator hangs says
so half a minute later."""


@dataclass(frozen=True, slots=True)
class DemoCoordinator:
    """A running coordinator, and the tokens that it accepts."""

    url: str
    producer_token: str
    consumer_token: str
    operator_token: str

    @classmethod
    def start(cls, group: ProcessGroup, scratch: Path) -> Self:
        """Make tokens, start it and wait until it listens.

        Raises:
            DemoError: It did not start; its log is in the message.
        """
        tokens_file = scratch / "tokens.json"
        producer_token, _ = create_token(tokens_file, roles=[Role.PRODUCER], member=PRODUCER_ID)
        consumer_token, _ = create_token(tokens_file, roles=[Role.CONSUMER], member=CONSUMER_ID)
        operator_token, _ = create_token(tokens_file, roles=[Role.OPERATOR])
        child = group.start_service(
            "coordinator",
            [sys.executable, "-m", "aqua_coordinator", "serve"],
            {
                "AQUA_LISTEN_PORT": "0",
                "AQUA_DATA_DIR": str(scratch / "coordinator"),
                "AQUA_TOKENS_FILE": str(tokens_file),
            },
        )
        return cls(_address(group, child), producer_token, consumer_token, operator_token)

    def obey(self, pairings: PlacementPlan) -> None:
        """Have it match as a plan says."""
        with CoordinatorClient(self.url, self.operator_token, timeout_s=START_LIMIT_S) as client:
            client.put_placements(pairings)


def _address(group: ProcessGroup, child: Child) -> str:
    """Where it listens, from its log."""
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s:
        for line in child.log.read_text(encoding="utf-8").splitlines():
            if '"listening"' in line:
                return str(json.loads(line)["url"])
        if child.wait(SAMPLE_INTERVAL_S) is not None:
            raise group.died(child.name)
    raise DemoError(
        f"the coordinator does not listen after {START_LIMIT_S:.0f} s:\n{child.log_tail()}"
    )

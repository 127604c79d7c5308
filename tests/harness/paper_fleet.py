"""A fleet of paper members that goes where a plan, or a hook of `aqua place apply`, says.

Each server of a plan is a domain and a node of its own here, under other names than the plan's.
The fleet reports to a real coordinator. As a hook, a step arrives through one named pipe and is
answered through another when the members have reported, so that no one waits by the clock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from aqua_client import CoordinatorClient
from aqua_placer.rollout.positions import Position, members_of, positions_after, target_of
from aqua_protocol.plan import Move, Plan
from harness.members_on_paper import PaperConsumer, PaperProducer

STOP: Final = "stop"


def domain_of(server: str) -> str:
    """The domain that a server of a plan is."""
    return f"rack.{server.replace('/', '-')}"


def node_of(server: str) -> str:
    """Its node."""
    return f"host.{server.replace('/', '-')}"


def gpu_of(server: str, gpu: int) -> str:
    """One of its GPUs."""
    return f"GPU-{server.replace('/', '-')}-{gpu}"


class PaperFleet:
    """Members by group.

    Args:
        client: Of the coordinator.
        roles: Role of each group; "" never reports.
    """

    def __init__(self, client: CoordinatorClient, roles: Mapping[str, str]) -> None:
        self._client: Final = client
        self._roles: Final = roles
        self.running: Final[dict[str, list[PaperProducer | PaperConsumer]]] = {}
        self.steps: Final[list[int]] = []
        self.lost: Final[set[str]] = set()

    def start(self, group: str, position: Position) -> None:
        """Let a group report from there; a second time moves it, in a new life."""
        if group in self.lost or not self._roles[group]:
            return
        self.stop(group)
        members: list[PaperProducer | PaperConsumer] = []
        names = members_of(group, len(position.gpus))
        for name, gpu in zip(names, position.gpus, strict=True):
            place = {
                "node": node_of(position.server),
                "domain": domain_of(position.server),
                "gpu_uuid": gpu_of(position.server, gpu),
            }
            if self._roles[group] == "producer":
                producer = PaperProducer(name)
                self._client.report_producer(producer.report(**place))
                members.append(producer)
            else:
                consumer = PaperConsumer(name)
                self._client.report_consumer(consumer.report(**place))
                members.append(consumer)
        self.running[group] = members

    def stop(self, group: str) -> None:
        """Let a group leave."""
        for member in self.running.pop(group, ()):
            if isinstance(member, PaperProducer):
                self._client.remove_producer(member.name, member.incarnation)
            else:
                self._client.remove_consumer(member.name, member.incarnation)

    def go_to(self, plan: Plan, step: int | None = None) -> None:
        """Be where a plan has everyone after a step."""
        positions = positions_after(plan, step)
        for group in [*self.running]:
            if group not in positions:
                self.stop(group)
        for group, position in positions.items():
            self.start(group, position)

    def take(self, move: Move) -> None:
        """Carry a step out."""
        self.steps.append(move.step)
        if (target := target_of(move)) is None:
            self.stop(move.group)
        else:
            self.start(move.group, target)

    @contextmanager
    def hook(self, directory: Path) -> Iterator[str]:
        """A command that has this fleet carry its step out."""
        asked, answered = directory / "asked", directory / "answered"
        os.mkfifo(asked)
        os.mkfifo(answered)
        thread = threading.Thread(target=self._serve, args=(asked, answered), daemon=True)
        thread.start()
        try:
            yield f"cat > {asked} && cat {answered}"
        finally:
            asked.write_text(STOP)
            thread.join()

    def _serve(self, asked: Path, answered: Path) -> None:
        while (text := asked.read_text()) != STOP:
            self.take(Move.model_validate_json(text))
            answered.write_text("")

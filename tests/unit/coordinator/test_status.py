"""`aqua-coordinator status`: who is shown as silent."""

from __future__ import annotations

import pytest
from rich.console import Console

from aqua_coordinator.status import Status
from aqua_protocol.leases import Health
from aqua_protocol.members import ConsumerView


@pytest.mark.parametrize(
    ("heartbeat_s", "silent_s", "shown"),
    [(1.0, 2.9, "present"), (1.0, 3.5, "silent for 4 s"), (60.0, 170.0, "present")],
)
def test_a_member_is_silent_after_three_heartbeats_as_the_coordinator_asks_for_them(
    heartbeat_s: float, silent_s: float, shown: str
) -> None:
    member = ConsumerView(
        consumer_id="c",
        node="n",
        domain="d",
        gpu_uuid="g",
        model=None,
        leased_bytes=0,
        wanted_bytes=0,
        spilled_bytes=0,
        silent_s=silent_s,
    )
    health = Health(status="ready", version="1", heartbeat_s=heartbeat_s)
    status = Status(health=health, producers=[], consumers=[member], leases=[], reclaims=[])
    console = Console(width=200)
    with console.capture() as captured:
        console.print(status.render("http://here"))
    assert shown in captured.get()

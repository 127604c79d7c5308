"""What happens to a consumer that does not give memory back in time.

There is no way to take a mapping away from another process, so a passed deadline never frees a
slab. It does two things: the slab is quarantined at once (it can never be lent again, whatever the
holder says later), and the policy decides about the holder. `wait` goes on waiting; the memory
comes back when the holder answers or its process ends. `kill` grants a grace period and then ends
the process, through the descriptor that has pinned it since it connected, so that a recycled pid
can never hit a stranger.

`next_step` is the whole decision; `kill_process` is the whole act.

Source: the paper has no answer to a consumer that hangs; this is ours.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aqua_protocol.ids import LeaseId
    from aqualib.producer.reclaims import ReclaimTicket

logger: Final = logging.getLogger("aqualib")


class Escalation(StrEnum):
    """What to do about a holder that overran a reclaim deadline."""

    WAIT = "wait"
    """Keep its slabs quarantined and go on waiting. No process is ever harmed."""
    KILL = "kill"
    """SIGKILL it after a grace period: the producer's memory matters more than the consumer."""


class EscalationStep(StrEnum):
    """What an ask needs now."""

    NOTHING = "nothing"
    QUARANTINE = "quarantine"
    KILL = "kill"


@dataclass(slots=True, eq=False)
class PendingReturn:
    """Slabs asked back from one lease, with a deadline.

    Attributes:
        deadline_at_s: When the slabs still missing are quarantined, by the monotonic clock.
        pending: Slab ids not answered yet.
        reclaim: The reclaim it serves; None when the lease's right has ended.
        kill_at_s: When the holder is killed under `Escalation.KILL`. The grace counts from the
            quarantine, not from the deadline: a producer that was itself stopped for a while
            must not kill consumers for its own absence.
        taken: The last step that was carried out; steps only go forward.
    """

    lease_id: LeaseId
    deadline_at_s: float
    pending: set[int] = field(default_factory=set)
    reclaim: ReclaimTicket | None = None
    kill_at_s: float = float("inf")
    taken: EscalationStep = EscalationStep.NOTHING


def next_step(ask: PendingReturn, policy: Escalation, now_s: float) -> EscalationStep:
    """The step that is due and has not been taken; quarantine always comes before a kill."""
    if ask.taken is EscalationStep.NOTHING:
        return EscalationStep.QUARANTINE if now_s >= ask.deadline_at_s else EscalationStep.NOTHING
    if (
        ask.taken is EscalationStep.QUARANTINE
        and policy is Escalation.KILL
        and now_s >= ask.kill_at_s
    ):
        return EscalationStep.KILL
    return EscalationStep.NOTHING


def due_at_s(ask: PendingReturn, policy: Escalation) -> float:
    """When `next_step` will next have something to say; infinity when never."""
    if ask.taken is EscalationStep.NOTHING:
        return ask.deadline_at_s
    if ask.taken is EscalationStep.QUARANTINE and policy is Escalation.KILL:
        return ask.kill_at_s
    return float("inf")


def kill_process(pidfd: int, *, pid: int, lease_id: LeaseId) -> None:
    """End the process behind `pidfd`; one that is gone already is what we wanted."""
    logger.error("killing process %d: it kept lease %s past its deadline", pid, lease_id)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        logger.info("process %d had already ended", pid)
    except PermissionError:
        # Another user's process, admitted by the allow-list: its slabs stay quarantined.
        logger.exception("process %d may not be killed by this user", pid)

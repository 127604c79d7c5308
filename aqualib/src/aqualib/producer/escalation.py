"""What happens to a consumer that does not give memory back in time.

There is no way to take a mapping away from another process, so a passed deadline never frees a
slab. It does two things: the slab is quarantined at once (it can never be lent again, whatever the
holder says later), and the policy decides about the holder. `wait` goes on waiting; the memory
comes back when the holder answers or its process ends. `kill` grants a grace period and then ends
the process, through the descriptor that has pinned it since it connected, so that a recycled pid
can never hit a stranger.

Source: the paper has no answer to a consumer that hangs; this is ours.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError, ConfigError
from aqualib.gpu_modes import is_under_mps

if TYPE_CHECKING:
    import torch

    from aqua_protocol.ids import LeaseId
    from aqualib.producer.reclaims import ReclaimTicket

logger: Final = logging.getLogger("aqualib")


class KillRefusedError(AquaError):
    """The kernel does not let this process end a holder; the holder's slabs stay quarantined."""

    code = "kill_refused"
    default_remedy = (
        "End it by hand, or run the producer as its user or root and where its PID is seen."
    )


class Escalation(StrEnum):
    """What to do about a holder that overran a reclaim deadline."""

    WAIT = "wait"
    """Keep its slabs quarantined and go on waiting. No process is ever harmed."""
    KILL = "kill"
    """SIGKILL it after a grace period: the producer's memory matters more than the consumer."""


def require_harmless(policy: Escalation, device: torch.device) -> None:
    """Refuse a policy that would harm processes other than the one it is aimed at.

    Raises:
        ConfigError: Kills, among clients of MPS, who share one context.
    """
    if policy is Escalation.KILL and device.type == "cuda" and is_under_mps():
        raise ConfigError(
            "a consumer that is killed under MPS may end the work of every client of the GPU",
            remedy="Set AQUA_ESCALATION=wait, or run producers and consumers outside MPS.",
        )


@dataclass(slots=True, eq=False)
class PendingReturn:
    """Slabs asked back from one lease, with a deadline.

    Attributes:
        due_at_s: By the monotonic clock: when the slabs still missing are quarantined; after that,
            when the holder is killed, or infinity. The grace counts from the quarantine, not from
            the deadline: a producer that was itself stopped for a while must not kill consumers
            for its own absence.
        pending: Slab ids not answered yet.
        reclaim: The reclaim it serves; None when the lease's right has ended.
        overdue: The deadline has passed, and the slabs are quarantined.
    """

    lease_id: LeaseId
    due_at_s: float
    pending: set[int]
    reclaim: ReclaimTicket | None = None
    overdue: bool = False


def kill_process(pidfd: int, *, pid: int, lease_id: LeaseId) -> None:
    """End the process behind `pidfd`; one that is gone already is what we wanted.

    Raises:
        KillRefusedError: It is of another user, or of a PID namespace unseen here (EINVAL).
    """
    logger.error("killing process %d: it kept lease %s past its deadline", pid, lease_id)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        logger.info("process %d had already ended", pid)
    except OSError as error:
        raise KillRefusedError(f"process {pid} cannot be killed: {error}") from error

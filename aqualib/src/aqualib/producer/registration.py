"""A producer's place in the coordinator's books: reports while it lives, a farewell at the end.

Wraps the reporter so that a producer without a coordinator is the same producer: reports go
nowhere, nothing waits, and only the farewell is left out.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError
from aqualib.reporter import Reporter

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqua_client import CoordinatorClient
    from aqua_protocol.ids import BooksId, Revision
    from aqua_protocol.members import ProducerAck, ProducerReport

logger: Final = logging.getLogger("aqualib")


class Registration:
    """Keeps one producer in the books.

    Args:
        link: To the coordinator; None for a producer without one.
        producer_id: Name in the books.
        incarnation: Of this process.
        heartbeat_s: Longest silence.
        build: Makes the report of this moment.
        take: Acts on the answer to a report.
    """

    def __init__(
        self,
        link: CoordinatorClient | None,
        *,
        producer_id: str,
        incarnation: str,
        heartbeat_s: float,
        build: Callable[[Revision, BooksId | None], ProducerReport],
        take: Callable[[ProducerReport, ProducerAck], None],
    ) -> None:
        self._link = link
        self._producer_id = producer_id
        self._incarnation = incarnation
        self._reporter: Reporter[ProducerReport, ProducerAck] | None = None
        if link is not None:
            self._reporter = Reporter(
                build, link.report_producer, take, heartbeat_s=heartbeat_s, name=producer_id
            )
            self._reporter.start()

    @property
    def error(self) -> AquaError | None:
        """Why the last report failed; None while the coordinator answers."""
        return None if self._reporter is None else self._reporter.error

    def changed(self) -> None:
        """Report soon; never waits."""
        if self._reporter is not None:
            self._reporter.changed()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the books know the state of this moment; False without a coordinator."""
        return self._reporter is not None and self._reporter.flush(timeout_s)

    def leave(self, *, holds_nothing: bool) -> None:
        """Report the last state and, if nothing is held any more, deregister.

        Bounded: an absent coordinator gets no farewell and declares the producer lost in time.
        """
        if self._reporter is None or self._link is None:
            return
        self._reporter.close(last_report=True)
        if self._reporter.error is None and holds_nothing:
            try:
                self._link.remove_producer(self._producer_id, self._incarnation)
            except AquaError as error:
                logger.info("%s could not say that it leaves: %s", self._producer_id, error)

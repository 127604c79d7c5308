"""Whether an engine starts without a coordinator: it does, says so, and joins when one appears.

Until one answers, an engine pages to host memory and lends nothing; its requests are served as
ever. That is the right default for an engine whose answers somebody waits for, and the wrong one
where a mistake in an address should not go unnoticed: `require_coordinator` refuses the start.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError, ConfigError, UnavailableError

if TYPE_CHECKING:
    from aqualib.settings import Settings

logger: Final = logging.getLogger("aqualib")


def look_for_coordinator(settings: Settings, *, is_required: bool) -> None:
    """Ask a coordinator once whether it is ready, and say in the log if none is.

    Takes a moment where nothing listens, and three times `AQUA_REQUEST_TIMEOUT_S` at most.

    Raises:
        UnavailableError: None is, and one is required.
        ConfigError: The address or a TLS file is no good.
    """
    try:
        with settings.coordinator_client() as link:
            link.readyz()
    except ConfigError:
        raise
    except AquaError as error:
        if is_required:
            raise UnavailableError(
                f"no coordinator is ready at {settings.coordinator_url}: {error.message}",
                remedy="Start one, correct AQUA_COORDINATOR_URL, or drop require_coordinator to "
                "start without.",
            ) from error
        logger.warning(
            "no coordinator is ready at %s (%s): this engine serves without peers' memory and "
            "joins when one appears; require_coordinator refuses the start instead",
            settings.coordinator_url,
            error.message,
        )

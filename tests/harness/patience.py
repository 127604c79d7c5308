"""How long the product waits in tests for what is late: longer than a busy machine stands still.

The product gives up on what is late after seconds: that is its task, and tests that are about it
name a bound of their own. Everywhere else a machine that stands still for ten seconds would decide.
So processes of tests get `SETTINGS`, and clients of the coordinator come from `patient_client`.
What is hung for good is caught by `harness.bounds.HANG_S`.
"""

from __future__ import annotations

import os
from typing import Any, Final

from aqua_client import CoordinatorClient
from harness.bounds import HANG_S

SETTINGS: Final = {
    "AQUA_STORE_TIMEOUT_S": "60",
    "AQUA_REQUEST_TIMEOUT_S": "60",
    "AQUA_ATTACH_WINDOW_S": "300",
    "AQUA_TRANSFER_TIMEOUT_S": "300",
}
"""Each as long as the setting allows."""


def variables(**settings: str) -> dict[str, str]:
    """This process's variables without its own `AQUA_*`, with `SETTINGS`, and these above all."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("AQUA_")}
    return ours | SETTINGS | settings


def patient_client(
    url: str,
    token: str | None = None,
    **options: Any,  # noqa: ANN401 - of the client
) -> CoordinatorClient:
    """A client whose sendings end when they are answered, or hang."""
    return CoordinatorClient(url, token, timeout_s=HANG_S, **options)

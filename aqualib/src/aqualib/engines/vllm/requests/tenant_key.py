"""The tenant of a request: the name by which `tenants` among the options share an engine.

A tenant is found in the first of the `tenant_sources` that names one. The scheduler sees two of
them: `aqua_tenant` in the request's `vllm_xargs`, and the name of its LoRA adapter. The other two,
a header and the API key, end in the server; the middleware (`admin_api`) looks at all in their
order and writes what it finds into `vllm_xargs`, so that it reaches the scheduler with the request
through whatever processes there are.

A name that a client gives is a claim. Where clients are not to be believed, let the gateway set the
header and drop theirs, or have `api_key` alone: a key names a tenant as `key-` and twelve digits of
its SHA-256 (`printf %s "$KEY" | sha256sum | cut -c1-12`), so that no key shows in a configuration
or a listing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from aqualib.engines.vllm.requests.body import Choose

XARG: Final = "aqua_tenant"
"""Among a request's `vllm_xargs`; fixed, as part of the interface."""

MAX_NAME_LENGTH: Final = 128
"""Characters of a tenant's name that count: names come from strangers and are kept. Doubled, so is
the memory that they can take."""


class TenantSource(StrEnum):
    """Where a request may say whose it is."""

    HEADER = "header"
    XARGS = "xargs"
    API_KEY = "api_key"
    LORA = "lora"


def tenant_of(request: Any, sources: Sequence[TenantSource]) -> str:
    """Name the tenant of a request of vLLM's, as its scheduler sees it; empty without one."""
    for source in sources:
        if source is TenantSource.LORA:
            lora = request.lora_request
            name = None if lora is None else lora.lora_name
        else:
            # Pooling requests have no sampling parameters.
            extra = getattr(request.sampling_params, "extra_args", None)
            name = extra.get(XARG) if extra else None
        if name and isinstance(name, str):
            return str(name[:MAX_NAME_LENGTH])
    return ""


def key_name(api_key: str) -> str:
    """The tenant of an API key."""
    return f"key-{hashlib.sha256(api_key.encode()).hexdigest()[:12]}"


def tenant_choice(sources: Sequence[TenantSource], *, header: str, api_key: str) -> Choose:
    """What says whose a request is, given what its body claims.

    Args:
        sources: In the order in which they count.
        header: The tenant's header; empty if there is none.
        api_key: Likewise.
    """

    def choose(content: Mapping[str, Any], claimed: object) -> str | None:
        del content
        found = {
            TenantSource.HEADER: header,
            TenantSource.API_KEY: key_name(api_key) if api_key else "",
            TenantSource.XARGS: claimed if isinstance(claimed, str) else "",
        }
        names = (found[source] for source in sources if source is not TenantSource.LORA)
        name = next(filter(None, names), None)
        return None if name is None else name[:MAX_NAME_LENGTH]

    return choose

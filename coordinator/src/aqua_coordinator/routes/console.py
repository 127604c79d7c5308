"""The console at `/`: the page and its files for everybody, the rest for who has a token.

A browser runs no script, loads no style and connects to nowhere but what comes from here, whatever
a name in the books may contain: the page's policy says so.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Header
from fastapi.responses import HTMLResponse, Response

from aqua_coordinator.access.tokens import Role
from aqua_coordinator.console.views import ConsoleTimeline
from aqua_coordinator.services import CallerDep, ServicesDep
from aqua_protocol import UnknownResourceError
from aqua_protocol.ids import Name

page = APIRouter(tags=["console"], include_in_schema=False)
router = APIRouter(prefix="/v1/console", tags=["console"])

STATIC: Final = resources.files("aqua_coordinator.console") / "static"
MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
"""By the end of a file's name; files of other kinds are not served."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FRAGMENT_HEADERS: Final = HEADERS | {"Cache-Control": "no-store"}


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Content, media type and tag of every file, by name: a few, read once."""
    found = {}
    for folder in (STATIC, STATIC / "vendor"):
        for file in folder.iterdir():
            kind = MEDIA_TYPES.get(file.name.rpartition(".")[2])
            if kind is not None:
                content = file.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                found[file.name] = content, kind, tag
    return found


Tag = Annotated[str | None, Header(alias="If-None-Match", max_length=256)]


@page.get("/")
async def console(if_none_match: Tag = None) -> Response:
    """The page; it says nothing of the cluster."""
    return _served("index.html", if_none_match)


@page.get("/console/{name}")
async def console_file(name: str, if_none_match: Tag = None) -> Response:
    """A file of the page."""
    return _served(name, if_none_match)


def _served(name: str, known: str | None) -> Response:
    if name not in _files():
        raise UnknownResourceError("the console has no such file", noun="file")
    content, kind, tag = _files()[name]
    # Asked for anew each time, so that a page and its script are of one version.
    headers = HEADERS | {"ETag": tag, "Cache-Control": "no-cache"}
    if known == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


@router.get("/cluster", response_class=HTMLResponse, include_in_schema=False)
async def cluster(caller: CallerDep, services: ServicesDep) -> HTMLResponse:
    """Draw figures and scale-up domains, for the console: HTML."""
    return HTMLResponse(await services.console.cluster(caller.tenant), headers=FRAGMENT_HEADERS)


@router.get("/happened", response_class=HTMLResponse, include_in_schema=False)
async def happened(caller: CallerDep, services: ServicesDep) -> HTMLResponse:
    """Tell what happened of late, for the console: HTML."""
    return HTMLResponse(await services.console.happened(caller.tenant), headers=FRAGMENT_HEADERS)


@router.get("/batches", response_class=HTMLResponse, include_in_schema=False)
async def batches(caller: CallerDep, services: ServicesDep) -> Response:
    """Tell how batches are going, for the console: HTML, or nothing where there is none to tell."""
    caller.require(Role.READER)
    # Tenants of the two services need not be the same, whatever they are called.
    text = "" if caller.tenant else await services.console.batches()
    if not text:
        return Response(status_code=204, headers=FRAGMENT_HEADERS)
    return HTMLResponse(text, headers=FRAGMENT_HEADERS)


@router.get("/{role}/{member_id}", response_class=HTMLResponse, include_in_schema=False)
async def member(
    role: Literal["producers", "consumers"],
    member_id: Name,
    caller: CallerDep,
    services: ServicesDep,
) -> HTMLResponse:
    """Say all there is to say of a member, for the console: HTML."""
    text = await services.console.member(caller.tenant, role, member_id)
    return HTMLResponse(text, headers=FRAGMENT_HEADERS)


@router.get("/timeline")
async def timeline(caller: CallerDep, services: ServicesDep, response: Response) -> ConsoleTimeline:
    """The last hour: sums over all members every ten seconds, and reclaims with their latencies.

    A token of a tenant sees reclaims of its own producers, and its own sums of now.
    """
    response.headers["Cache-Control"] = "no-store"
    return await services.console.timeline(caller.tenant)

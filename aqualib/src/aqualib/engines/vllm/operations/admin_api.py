r"""The admin API of an engine: a middleware of vLLM's OpenAI server, which answers `/aqua/...`.

    python -m vllm.entrypoints.openai.api_server --model M \
      --scheduler-cls aqualib.engines.vllm.AquaScheduler \
      --middleware aqualib.engines.vllm.AquaMiddleware

    GET   /aqua/switches                       {"engines": [{"slicing": true, "paging": true, ...}]}
    PATCH /aqua/switches  {"paging": false}    likewise, as they stand then
    GET   /aqua/tenants                        {"engines": [{"team-a": {"served": 1234.0, ...}}]}
    PATCH /aqua/steps     {"recording": true}  forgets recorded steps, and records those that follow
    GET   /aqua/steps                          {"engines": [{"model": ..., "steps": [...], ...}]}
    GET   /aqua/pins                           {"engines": [{"pins": [...], "pinned_blocks": 8}]}
    PUT   /aqua/pins/ID  {"prompt_token_ids": [...], "ttl_s": 600}          pins a prefix (`pins`)
    DELETE /aqua/pins/ID                       lets it go; those that are left
    GET   /aqua/evictions                      {"engines": [{"evictions": [...]}]}
    POST  /aqua/evictions  {"request_ids": [...], "hold_s": 10}             evicts (`evictions`)
    DELETE /aqua/evictions/ID                  resumes a request; those that are still evicted

Every data-parallel rank answers for itself, in order: `engines` has one entry for each, null where
a rank does not know what others do, such as a request. Errors are Aqua's (`{code, message, remedy,
...}`); of several the first.

A middleware runs before vLLM looks at its API keys, and an operator's rights are not a user's. So
the admin API has a token of its own, `AQUA_ADMIN_TOKEN`, and without one it refuses every call.
All other paths go to vLLM; on the way a request is told whose it is (`tenant_key`), whether it is
online or offline (`service_class`), and its deadline (`deadline`), if that is not in its body. A
body is read when vLLM asks for it, which is after it has looked at its keys: for a stranger no byte
is held.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from aqua_protocol import AquaError, ConfigError, UnavailableError
from aqua_protocol.errors import (
    ErrorBody,
    ForbiddenError,
    MethodNotAllowedError,
    RequestInvalidError,
    RequestTooLargeError,
    UnauthenticatedError,
    UnknownResourceError,
    error_from_body,
)
from aqualib.engines.vllm.operations.admin_commands import UTILITY
from aqualib.engines.vllm.options import AquaOptions, options_of
from aqualib.engines.vllm.requests.body import Choose, with_xargs
from aqualib.engines.vllm.requests.deadline import HEADER as DEADLINE_HEADER
from aqualib.engines.vllm.requests.deadline import XARG as DEADLINE
from aqualib.engines.vllm.requests.deadline import deadline_choice
from aqualib.engines.vllm.requests.service_class import HEADER, class_choice
from aqualib.engines.vllm.requests.service_class import XARG as CLASS
from aqualib.engines.vllm.requests.tenant_key import XARG as TENANT
from aqualib.engines.vllm.requests.tenant_key import TenantSource, tenant_choice
from aqualib.settings import load_settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PREFIX: Final = "/aqua/"
"""Paths that are answered here; fixed, as the API's name."""

MAX_BODY_BYTES: Final = 64 * 1024
"""A command is a handful of fields. Doubled, a caller can make the server hold twice as much."""

MAX_PIN_BYTES: Final = 8 * 1024 * 1024
"""A prefix of a million tokens. Doubled, a caller can make the server hold twice as much, and a
step wait twice as long while the prefix is hashed."""

MAX_REQUEST_BYTES: Final = 256 * 1024 * 1024
"""Of a prompt with its images, where its tenant, class or deadline has to be written into it;
longer ones are refused. Doubled, a caller can make the server hold twice as much."""

DISCONNECT: Final = "http.disconnect"
"""Fixed, by ASGI."""

FIRST: Final = 0
"""Of several headers of one name, that which vLLM goes by; fixed by it."""

LAST: Final = -1
"""Of several, that which a gateway adds to its client's; fixed, as part of the interface."""

ROUTES: Final = {
    "switches": {"GET": "read-switches", "PATCH": "change-switches"},
    "tenants": {"GET": "read-tenants"},
    "steps": {"GET": "read-steps", "PATCH": "record-steps"},
    "pins": {"GET": "list-pins"},
    "pins/ID": {"PUT": "pin", "DELETE": "unpin"},
    "evictions": {"GET": "list-evictions", "POST": "evict"},
    "evictions/ID": {"DELETE": "resume"},
}
"""By path and method, the command of `admin_commands`, which takes an ID as its `id`."""


class AquaMiddleware:
    """vLLM makes it from `--middleware`, once for each API process.

    Raises:
        ConfigError: A setting of the environment is wrong.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        token = load_settings().admin_token
        self._token = None if token is None else token.get_secret_value()
        self._options: AquaOptions | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is asked of Aqua; let vLLM answer the rest."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            if not path.startswith(PREFIX):
                choices = self._choices(scope)
                if choices:
                    await self._with_xargs(scope, receive, send, choices)
                else:
                    await self._app(scope, receive, send)
                return
            self._require_admin(scope)
            command, named = _command_of(scope["method"], path.removeprefix(PREFIX))
            most_bytes = MAX_PIN_BYTES if command == "pin" else MAX_BODY_BYTES
            body = await body_of(receive, most_bytes)
            if body is None:
                return  # Half a command is none, and its client is gone.
            arguments = {**_object_in(body), **named}
            results = await _ask(scope["app"].state.engine_client, command, arguments)
        except AquaError as error:
            said = error.to_body().model_dump()
            extra = [(b"www-authenticate", b"Bearer")] if error.http_status == 401 else []  # noqa: PLR2004 - HTTP's
            await _send_json(send, error.http_status, said, extra)
        else:
            await _send_json(send, 200, {"engines": results})

    def _choices(self, scope: Scope) -> dict[str, Choose]:
        """What of a request's body is written by its headers: whose it is, how and when served."""
        kind = header_of(scope, b"content-type", at=FIRST).lower()
        if scope["method"] != "POST" or not kind.startswith("application/json"):
            return {}
        if self._options is None:
            self._options = options_of(scope["app"].state.engine_client.vllm_config)
        options = self._options
        sources = options.tenant_sources if options.tenants is not None else ()
        header = next(
            filter(None, (header_of(scope, name.encode()) for name in options.tenant_headers)), ""
        )
        choices: dict[str, Choose] = {}
        # Where a body's word does not count, it must not reach the scheduler.
        if TenantSource.API_KEY in sources or (
            TenantSource.HEADER in sources and (header or TenantSource.XARGS not in sources)
        ):
            key = header_of(scope, b"authorization", at=FIRST).partition(" ")[2]
            choices[TENANT] = tenant_choice(sources, header=header, api_key=key)
        if options.co_serving is not None:
            choices[CLASS] = class_choice(header_of(scope, HEADER.encode()))
            choices[DEADLINE] = deadline_choice(header_of(scope, DEADLINE_HEADER.encode()))
        return choices

    async def _with_xargs(
        self, scope: Scope, receive: Receive, send: Send, choices: Mapping[str, Choose]
    ) -> None:
        """Have vLLM answer a request with another body.

        Raises:
            RequestInvalidError: Its body is nested too deeply.
            RequestTooLargeError: Its body is too long.
        """
        is_read = False
        refusal: AquaError | None = None

        async def rewritten() -> Message:
            nonlocal is_read, refusal
            if is_read:
                return await receive()
            is_read = True
            try:
                body = await body_of(receive, MAX_REQUEST_BYTES)
                if body is None:
                    return {"type": DISCONNECT}
                written = with_xargs(body, choices)
            except AquaError as error:
                refusal = error
                raise
            return {"type": "http.request", "body": written, "more_body": False}

        async def answer(message: Message) -> None:
            if refusal is None:  # Else what vLLM makes of it is not the answer.
                await send(message)

        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        try:
            await self._app({**scope, "headers": headers}, rewritten, answer)
        except Exception:
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal

    def _require_admin(self, scope: Scope) -> None:
        if self._token is None:
            raise ForbiddenError(
                "this engine has no admin token, so its admin API is closed",
                remedy="Start it with AQUA_ADMIN_TOKEN set.",
            )
        given = header_of(scope, b"authorization").split(" ", 1)
        is_bearer = len(given) == 2 and given[0].lower() == "bearer"  # noqa: PLR2004 - scheme, token
        if not is_bearer or not hmac.compare_digest(given[1].encode(), self._token.encode()):
            raise UnauthenticatedError(
                "not the admin token", remedy="Send `Authorization: Bearer $AQUA_ADMIN_TOKEN`."
            )


async def body_of(receive: Receive, max_bytes: int) -> bytes | None:
    """Read a request's body; None if its client went away before the end.

    Raises:
        RequestTooLargeError: It is longer than that.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == DISCONNECT:
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise RequestTooLargeError(f"a body of more than {max_bytes} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def header_of(scope: Scope, name: bytes, *, at: int = LAST) -> str:
    """A header's value, by default the last of several; empty if there is none."""
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    if not values:
        return ""
    try:
        return values[at].decode().strip()
    except UnicodeDecodeError:
        return values[at].decode("latin-1").strip()


def _command_of(method: str, resource: str) -> tuple[str, dict[str, str]]:
    """The command of a path, and what the path says of its arguments."""
    name, _, item = resource.partition("/")
    commands = ROUTES.get(f"{name}/ID" if item else resource)
    if commands is None:
        known = ", ".join(PREFIX + each for each in ROUTES)
        raise UnknownResourceError(f"no {PREFIX}{resource}", remedy=f"There are: {known}.")
    if method not in commands:
        raise MethodNotAllowedError(f"not {method}", remedy=f"It takes {', '.join(commands)}.")
    return commands[method], {"id": item} if item else {}


def _object_in(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestInvalidError(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestInvalidError("the body is not a JSON object")
    return given


async def _ask(
    engine_client: Any, command: str, arguments: dict[str, Any]
) -> list[dict[str, Any] | None]:
    """Have every rank's scheduler answer.

    Raises:
        AquaError: What one of them refused with.
        RequestInvalidError: It has numbers or letters that no message to an engine can carry.
        UnavailableError: The engine has died, or is not one of ours.
    """
    core = engine_client.engine_core
    # Until 0.31 there is one call for all ranks, with the answer of the first.
    call = getattr(core, "call_utility_all_async", None)
    try:
        if call is not None:
            answers = await call(UTILITY, command, arguments)
        else:
            answers = [await core.call_utility_async(UTILITY, command, arguments)]
    except (OverflowError, UnicodeEncodeError) as error:
        raise RequestInvalidError(f"the engine cannot be sent this: {error}") from error
    except Exception as error:
        if "not callable" in str(error) or "not a callable" in str(error):
            raise ConfigError(
                "this engine's scheduler is not Aqua's",
                remedy="Start it with --scheduler-cls aqualib.engines.vllm.AquaScheduler.",
            ) from error
        raise UnavailableError(f"the engine did not answer: {error}") from error
    errors = [
        error_from_body(ErrorBody.model_validate(answer["error"]))
        for answer in answers
        if "error" in answer
    ]
    for refusal in errors:
        if len(errors) == len(answers) or not isinstance(refusal, UnknownResourceError):
            raise refusal
    return [answer.get("result") for answer in answers]


async def _send_json(
    send: Send, status: int, content: dict[str, Any], extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(extra or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

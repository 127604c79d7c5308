"""The placer over HTTP: the same solve, replan and check, for coordinators and dashboards.

    POST /v1/plans          {problem, objective?, matching?, time_limit_s?, seed?}  -> Plan
    POST /v1/replacements   {problem, current?, epsilon?, max_moves?, ...}          -> Plan
    POST /v1/checks         {problem, plan}                                         -> verdict
    GET  /healthz, /readyz

Stateless; bounded in body size, time and concurrent solves (a full house answers 503 with
`retry_after_s`). A client that goes away interrupts its solve. With a token every /v1 call needs
`Authorization: Bearer`; without one only loopback addresses may be bound (`cli.serve`).
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import Field

from aqua_placer.budget import Budget
from aqua_placer.plan.files import plan_from
from aqua_placer.plan.verification import PlanVerdict, check_plan
from aqua_placer.problem.parser import instance_from
from aqua_placer.problem.request import Request as SolveRequest
from aqua_placer.relocate.relocation import Relocation, relocate
from aqua_placer.solve.placement import place
from aqua_protocol import AquaError, RequestInvalidError, UnavailableError
from aqua_protocol.errors import UnauthenticatedError
from aqua_protocol.plan import MatchingMode, Objective, Plan
from aqua_protocol.supervision import SupervisedTask, resting
from aqua_protocol.wire import Wire

MAX_BODY_BYTES: Final = 64 << 20
"""A million groups as columns take some 40 MB. Doubled, a request may take twice the memory."""

MAX_TIME_LIMIT_S: Final = 600.0
"""Seconds that a caller may ask for; doubled, a slot is held twice as long."""

MAX_CONCURRENT: Final = 2
"""Solves at once, each on one thread; doubled, all of them are slower on two cores."""

DISCONNECT_POLL_S: Final = 0.25
"""Seconds between looks at the connection; doubled, an abandoned solve runs that much longer."""


class PlanRequest(Wire):
    """Solve a problem; `problem` is either form of a problem file."""

    problem: dict[str, Any]
    objective: Objective = Objective.COVERAGE
    matching: MatchingMode = MatchingMode.STABLE
    time_limit_s: Annotated[float, Field(gt=0, le=MAX_TIME_LIMIT_S)] = 30.0
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0

    @property
    def wanted(self) -> SolveRequest:
        """What to solve for."""
        return SolveRequest(objective=self.objective, matching=self.matching, seed=self.seed)


class ReplacementRequest(PlanRequest):
    """Re-place: `current` is today's plan, or the problem says where groups are."""

    current: dict[str, Any] | None = None
    epsilon: Annotated[float, Field(ge=0, lt=1)] = 0.01
    max_moves: Annotated[int, Field(ge=0)] | None = None


class CheckRequest(Wire):
    """Verify a plan."""

    problem: dict[str, Any]
    plan: dict[str, Any]


def create_app(token: str | None = None) -> FastAPI:  # noqa: C901 - routes close over the token
    """The service; `token` is what callers must bear, None for open."""
    app = FastAPI(title="Aqua placer", version="1")
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    def authorised(authorization: Annotated[str, Header()] = "") -> None:
        expected = f"Bearer {token}"
        if token is not None and not hmac.compare_digest(authorization.encode(), expected.encode()):
            raise UnauthenticatedError("this placer wants a bearer token")

    guarded = [Depends(authorised)]

    async def solving(request: Request, limit_s: float, work: Callable[[Budget], Plan]) -> Plan:
        """Run `work(budget)` in a thread; interrupt it when the client goes away."""
        if slots.locked():
            raise UnavailableError(
                f"{MAX_CONCURRENT} solves are running", remedy="Retry.", retry_after_s=1.0
            )
        async with slots:
            interrupt = threading.Event()

            async def watch() -> None:
                while not await request.is_disconnected():
                    with resting():
                        await asyncio.sleep(DISCONNECT_POLL_S)
                interrupt.set()

            try:
                async with SupervisedTask(watch, "disconnect-watcher"):
                    return await run_in_threadpool(work, Budget(limit_s, interrupt=interrupt))
            finally:
                interrupt.set()

    @app.middleware("http")
    async def bounded(request: Request, following: Any) -> Any:  # noqa: ANN401 - Starlette's
        length = request.headers.get("content-length")
        chunked = request.method == "POST" and length is None
        if chunked or (length is not None and int(length) > MAX_BODY_BYTES):
            return _failure(
                RequestInvalidError(
                    f"the body must state a length of up to {MAX_BODY_BYTES} bytes",
                    remedy="Send Content-Length; split larger clusters.",
                )
            )
        return await following(request)

    @app.exception_handler(AquaError)
    async def typed(_: Request, error: AquaError) -> JSONResponse:
        return _failure(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place_ = ".".join(str(part) for part in first["loc"])
        return _failure(RequestInvalidError(f"{place_}: {first['msg']}"))

    @app.post("/v1/plans", dependencies=guarded)
    async def plans(body: PlanRequest, request: Request) -> Plan:
        """Solve."""

        def work(budget: Budget) -> Plan:
            return place(instance_from(body.problem), body.wanted, budget)

        return await solving(request, body.time_limit_s, work)

    @app.post("/v1/replacements", dependencies=guarded)
    async def replacements(body: ReplacementRequest, request: Request) -> Plan:
        """Re-place with few migrations."""

        def work(budget: Budget) -> Plan:
            today = None if body.current is None else plan_from(body.current, "current")
            relocation = Relocation(body.epsilon, body.max_moves)
            return relocate(instance_from(body.problem), today, body.wanted, relocation, budget)[0]

        return await solving(request, body.time_limit_s, work)

    @app.post("/v1/checks", dependencies=guarded)
    def checks(body: CheckRequest) -> PlanVerdict:
        """Verify a plan independently of the solvers."""
        return check_plan(instance_from(body.problem), plan_from(body.plan, "plan"))

    @app.get("/healthz")
    @app.get("/readyz")
    def liveness() -> dict[str, str]:
        """Always well while it answers: there is nothing else it needs."""
        return {"status": "ok"}

    return app


def _failure(error: AquaError) -> JSONResponse:
    wait_s = error.retry_after_s
    headers = {} if wait_s is None else {"Retry-After": f"{max(1, wait_s):.0f}"}
    return JSONResponse(
        error.to_body().model_dump(mode="json"), status_code=error.http_status, headers=headers
    )

"""What an operator asks of a running engine, as its scheduler's process answers it.

The front end (`admin_api`) reaches this process by vLLM's own utility calls: they name a method of
`EngineCore`, and `EngineCore.scheduler` is one that can be called, because our schedulers are. So
commands arrive between two steps, on the scheduler's thread, at an idle engine too, from every API
process and at every data-parallel rank, and nothing of vLLM is patched for it.

A command is a name and a JSON object; so is its answer, `{"result": ...}` or `{"error": ...}`: what
vLLM makes of exceptions would lose their type.
"""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from aqua_protocol import AquaError, ConfigError
from aqua_protocol.errors import RequestInvalidError
from aqualib.engines.vllm.operations.evictions import EvictionRequest
from aqualib.engines.vllm.operations.step_log import RecordingState, engine_key, engine_limits
from aqualib.engines.vllm.operations.switches import SwitchState
from aqualib.engines.vllm.paging.pins import PinRequest, PrefixPinTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqualib.engines.vllm.lending.scheduler import LendingScheduler
    from aqualib.engines.vllm.scheduling.eviction_scheduler import EvictionScheduler

UTILITY: Final = "scheduler"
"""The attribute of vLLM's `EngineCore` that is called; fixed by vLLM."""

MAX_TENANTS: Final = 1000
"""Tenants in one answer, those served most: finding them takes a millisecond, of a step. Doubled,
the step that answers takes two."""


class IdRequest(BaseModel):
    """A command about what has this id."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str


def answer(scheduler: LendingScheduler, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked; what is wrong with it becomes the answer."""
    try:
        return {"result": COMMANDS[command](scheduler, arguments)}
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        refused = RequestInvalidError("; ".join(faults), remedy="Correct the named fields.")
        return {"error": refused.to_body().model_dump()}
    except AquaError as error:
        return {"error": error.to_body().model_dump()}


def _read_switches(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    del arguments
    return scheduler.switches.states().model_dump()


def _change_switches(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    scheduler.switches.change(SwitchState.model_validate(arguments))
    return scheduler.switches.states().model_dump()


def _read_tenants(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    del arguments
    accounts = getattr(scheduler, "accounts", None)
    if accounts is None:
        raise ConfigError(
            "this engine's requests are all alike", remedy='Start it with "tenants" in its options.'
        )
    shown = nlargest(MAX_TENANTS, accounts.counters, key=accounts.counters.__getitem__)
    return {
        name: {
            "weight": accounts.settings.weight_of(name),
            "served": round(accounts.counters[name], 3),
            "waiting": accounts.waiting.get(name, 0),
        }
        for name in shown
    }


def _read_steps(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    del arguments
    return {
        **engine_key(scheduler.vllm_config)._asdict(),
        "recording": scheduler.step_log.is_recording,
        "limits": engine_limits(scheduler),
        "steps": [[*load, seconds] for load, seconds in scheduler.step_log.steps],
    }


def _record_steps(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    wanted = RecordingState.model_validate(arguments)
    scheduler.step_log.record(recording=wanted.recording)
    return wanted.model_dump()


def _pins_of(scheduler: LendingScheduler) -> PrefixPinTable:
    if scheduler.pins is None:
        raise ConfigError(
            "this engine keeps no prefixes",
            remedy="Start it with AquaScheduler and AquaConnector, and with prefix caching or "
            '"prefix_tier": true.',
        )
    # So that an idle engine makes a step, in which workers report and figures leave.
    scheduler.switches.has_changed = True
    return scheduler.pins


def _list_pins(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    del arguments
    return _pins_of(scheduler).states()


def _pin(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    return _pins_of(scheduler).pin(PinRequest.model_validate(arguments))


def _unpin(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    pins = _pins_of(scheduler)
    pins.unpin(IdRequest.model_validate(arguments).id)
    return pins.states()


def _evictor_of(scheduler: LendingScheduler) -> EvictionScheduler:
    if not hasattr(scheduler, "evict"):
        raise ConfigError(
            "this engine's scheduler does not evict",
            remedy="Start it with --scheduler-cls aqualib.engines.vllm.AquaScheduler.",
        )
    return cast("EvictionScheduler", scheduler)


def _list_evictions(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    del arguments
    return {"evictions": _evictor_of(scheduler).evictions()}


def _evict(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    evictor = _evictor_of(scheduler)
    return {"evictions": evictor.evict(EvictionRequest.model_validate(arguments))}


def _resume(scheduler: LendingScheduler, arguments: dict[str, Any]) -> dict[str, Any]:
    evictor = _evictor_of(scheduler)
    evictor.resume_evicted(IdRequest.model_validate(arguments).id)
    return {"evictions": evictor.evictions()}


COMMANDS: Final[dict[str, Callable[[LendingScheduler, dict[str, Any]], dict[str, Any]]]] = {
    "read-switches": _read_switches,
    "change-switches": _change_switches,
    "read-tenants": _read_tenants,
    "read-steps": _read_steps,
    "record-steps": _record_steps,
    "list-pins": _list_pins,
    "pin": _pin,
    "unpin": _unpin,
    "list-evictions": _list_evictions,
    "evict": _evict,
    "resume": _resume,
}
"""By name, as the front end sends them."""

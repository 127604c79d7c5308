"""One engine on each of several nodes of a Ray cluster.

Ray does what a scheduler of machines does: a placement group with STRICT_SPREAD reserves a place on
as many nodes as are asked for, an actor runs in each, and when a node dies Ray looks for another
place. This module carries shares and answers, and turns what Ray says into events.

Every engine has two calls under way, so that it works while the answers of the first travel. The
answers of calls that never came back are lost with the engine; the run repeats those requests, and
only those. A new actor is asked for in the lost one's place at once. It joins when Ray has found
room: in the same node if only the process died, in another if the cluster has one to spare, else
never, and the others do its work. An engine that starts and says what is wrong (no such model on
that node) is not asked for again.

The actors belong to this process: when it dies, Ray ends them and frees their places.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Self

from aqua_batch.engine import CacheCounters, EngineProperties
from aqua_batch.feed import Share
from aqua_batch.fleet import Event, Lost, Ready, Report
from aqua_batch.ray_actor import EngineActor, EngineFactory
from aqua_protocol.errors import (
    AquaError,
    CapacityError,
    ConfigError,
    ErrorBody,
    UnavailableError,
    error_from_body,
)

ADVANCE_S: Final = 0.5
"""Seconds between reports of an engine: what a lost one has to repeat, against calls per second.
Doubled, a lost engine repeats twice as much."""

CALLS_UNDER_WAY: Final = 2
"""Calls to an engine, so that it works while the answers of one travel. Doubled, nothing gets
faster and a lost engine loses more."""

PROBE_TIMEOUT_S: Final = 5.0
"""Seconds for the cluster's address to accept a connection; Ray itself would try for a minute.
Doubled, a wrong address is said five seconds later."""

SILENCE_S: Final = 1800.0
"""Seconds; an engine that reports nothing for so long hangs, because no step takes half an hour.
Doubled, a run with a hanging engine waits an hour."""

MAX_FAILED_STARTS: Final = 3
"""Engines in a row that die while they start, before a node is given up; one may die by chance.
Doubled, a broken node is tried three more times."""

MAX_ERROR_CHARS: Final = 300
"""Characters of one line of Ray's in an error, which are pages. Doubled, errors are longer."""

FORWARDED_VARIABLES: Final = ("VLLM_", "HF_", "TOKENIZERS_")
"""Variables of this process that engines get too."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What is asked of Ray.

    Attributes:
        node_count: Engines, each on a node of its own.
        gpus: GPUs of each engine.
        gpus_are_asked: Whether a cluster without GPUs will not do.
        cpus: CPUs that Ray reserves for each; a CPU engine's threads too.
        wait_s: How long to wait for Ray to find room.
    """

    node_count: int
    gpus: int
    gpus_are_asked: bool
    cpus: int
    wait_s: float


class _Stage(Enum):
    PLACING = auto()
    STARTING = auto()
    READY = auto()
    GONE = auto()


@dataclass(slots=True)
class _Node:
    """An engine's place.

    Attributes:
        calls: What is under way, oldest first.
        failed_starts: Engines in a row that died before they were ready.
    """

    index: int
    actor: Any
    stage: _Stage = _Stage.PLACING
    host: str = "?"
    facts: EngineProperties | None = None
    calls: deque[Any] = field(default_factory=deque)
    failed_starts: int = 0

    def __str__(self) -> str:
        return f"engine {self.index + 1} on {self.host}"


class RayFleet:
    """Engines on a Ray cluster; a context manager that gives the places back.

    Args:
        make_engine: Called in each actor.
        address: Of the cluster, `host:port`; None for RAY_ADDRESS or the one on this machine.
        say: Told what is waited for, in words.

    Raises:
        UnavailableError: Ray is not installed, or the cluster cannot be reached.
        ConfigError: An engine says that it cannot start.
        CapacityError: The cluster has not enough nodes with room.
    """

    def __init__(
        self,
        make_engine: EngineFactory,
        placement: Placement,
        *,
        address: str | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ray = _import_ray()
        self._make_engine = make_engine
        self._placement = placement
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(FORWARDED_VARIABLES)
        }
        self._gpus = 0
        self._group: Any = None
        self._nodes: list[_Node] = []
        _connect(self._ray, address)
        try:
            self._reserve(say)
            self._nodes = [
                _Node(index, self._new_actor(index)) for index in range(placement.node_count)
            ]
            for node in self._nodes:
                node.calls.append(node.actor.host.remote())
            say(f"starting {placement.node_count} engines")
            while any(node.stage is not _Stage.READY for node in self._nodes):
                _refuse_losses(self.wait())
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> EngineProperties:
        """What all engines can hold."""
        facts = [node.facts for node in self._nodes if node.facts is not None]
        longest = [each.longest_tokens for each in facts if each.longest_tokens is not None]
        return EngineProperties(
            min(each.capacity_tokens for each in facts),
            min(each.max_step_tokens for each in facts),
            min(longest, default=None),
        )

    def ready_nodes(self) -> list[int]:
        """Engines that live."""
        return [node.index for node in self._nodes if node.stage is _Stage.READY]

    def begin(self, node: int, share: Share) -> None:
        """Send a share."""
        place = self._nodes[node]
        assert place.stage is _Stage.READY, f"{place} is {place.stage}"
        assert not place.calls, f"{place} has not ended its share"
        # Its result is awaited by the calls behind it: an actor works in order.
        place.calls.append(place.actor.begin.remote(share.packed()))
        place.calls.extend(place.actor.advance.remote(ADVANCE_S) for _ in range(CALLS_UNDER_WAY))

    def wait(self) -> list[Event]:
        """Block until an engine reports, dies or comes back."""
        ray = self._ray
        heads = {node.calls[0]: node for node in self._nodes if node.calls}
        works = any(
            node.calls and node.stage in {_Stage.STARTING, _Stage.READY} for node in self._nodes
        )
        limit_s = SILENCE_S if works else self._placement.wait_s
        ready, _ = ray.wait(list(heads), num_returns=1, timeout=limit_s) if heads else ([], [])
        if not ready:
            raise UnavailableError(
                f"no engine reported anything for {limit_s:.0f} s"
                if works
                else f"no engine is left, and Ray found no place for another in {limit_s:.0f} s",
                remedy="What was finished is kept. When the cluster is well again, the same "
                "command goes on from there.",
            )
        done, _ = ray.wait(list(heads), num_returns=len(heads), timeout=0)
        events = [self._settle(heads[each]) for each in done]
        return [event for event in events if event is not None]

    def cache_counters(self) -> CacheCounters:
        """Sum of the counters of the engines that live."""
        counters = self._ray.get(
            [self._nodes[index].actor.cache_counters.remote() for index in self.ready_nodes()]
        )
        return CacheCounters(
            sum(each.queried_tokens for each in counters), sum(each.hit_tokens for each in counters)
        )

    def close(self) -> None:
        """End the engines and give their places back; harmless when closed."""
        if self._ray.is_initialized():
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- Places --------------------------------------------------------------------------

    def _reserve(self, say: Callable[[str], None]) -> None:
        wanted, ray = self._placement, self._ray
        alive = [node for node in ray.nodes() if node["Alive"]]
        has_gpus = any(node["Resources"].get("GPU", 0) for node in alive)
        self._gpus = wanted.gpus if has_gpus or wanted.gpus_are_asked else 0
        bundle = {"CPU": wanted.cpus, **({"GPU": self._gpus} if self._gpus else {})}
        fit = [
            node
            for node in alive
            if all(node["Resources"].get(name, 0) >= count for name, count in bundle.items())
        ]
        self._group = ray.util.placement_group([bundle] * wanted.node_count, "STRICT_SPREAD")
        if len(fit) < wanted.node_count:
            say(
                f"{len(fit)} nodes of the cluster have {_words(bundle)}, {wanted.node_count} "
                f"engines want one each; waiting {wanted.wait_s:.0f} s for more to join"
            )
        if not self._group.wait(timeout_seconds=wanted.wait_s):
            lack = ", and some of it is taken" if len(fit) >= wanted.node_count else ""
            raise CapacityError(
                f"{wanted.node_count} engines want {_words(bundle)} each, on a node of their own; "
                f"of the cluster's {len(alive)} nodes {len(fit)} have that{lack}",
                remedy="Ask for fewer --nodes, add nodes (`ray status` shows them), or wait.",
            )

    def _new_actor(self, index: int) -> Any:  # noqa: ANN401 - Ray's handle
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self._group,
            placement_group_bundle_index=index,
            # Or the engine's own processes would look for more places in the group.
            placement_group_capture_child_tasks=False,
        )
        kind = self._ray.remote(EngineActor)
        return kind.options(
            num_cpus=self._placement.cpus,
            num_gpus=self._gpus,
            scheduling_strategy=strategy,
            max_restarts=0,  # a restarted actor would be an engine without a start
        ).remote(index)

    # --- What becomes of a call ------------------------------------------------------------

    def _settle(self, node: _Node) -> Event | None:
        """Take the result of a node's oldest call, and ask for the next."""
        call = node.calls.popleft()
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            return self._lose(node, error)
        if isinstance(result, Report):
            if result.left == 0:
                # The calls behind it find no share and say so at once.
                node.calls.clear()
            else:
                node.calls.append(node.actor.advance.remote(ADVANCE_S))
            return result
        if isinstance(result, str):
            node.host, node.stage = result, _Stage.STARTING
            node.calls.append(node.actor.start.remote(self._make_engine, self._environment))
        elif isinstance(result, EngineProperties):
            node.facts, node.stage = result, _Stage.READY
            return Ready(node.index)
        elif isinstance(result, ErrorBody):
            node.stage = _Stage.GONE
            return self._refuse(node, error_from_body(result))
        return None

    def _lose(self, node: _Node, error: Exception) -> Event:
        reason = f"{node} died: {_brief(error)}"
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(node.actor)
        node.calls.clear()
        node.failed_starts = 0 if node.stage is _Stage.READY else node.failed_starts + 1
        node.facts = None
        if node.failed_starts == MAX_FAILED_STARTS:
            node.stage = _Stage.GONE
        else:
            node.stage = _Stage.PLACING
            node.actor = self._new_actor(node.index)
            node.calls.append(node.actor.host.remote())
        return Lost(node.index, reason)

    def _refuse(self, node: _Node, error: AquaError) -> Event:
        if all(each.stage is not _Stage.READY for each in self._nodes):
            error.message = f"{node}: {error.message}"
            raise error
        return Lost(node.index, f"{node} cannot start: {error.message}")


def _refuse_losses(events: list[Event]) -> None:
    """Before the run has begun: what does not start now will not start later."""
    for event in events:
        if isinstance(event, Lost):
            raise ConfigError(event.reason, remedy="See Ray's logs on that node.")


def _import_ray() -> Any:  # noqa: ANN401 - an optional package
    # Read when ray is imported. A driver without GPUs is no mistake, and says nothing.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise UnavailableError(
            "several nodes want Ray, which is not installed in this environment",
            remedy="pip install 'aqua-batch[ray]' here and on each node.",
        ) from error
    return ray


def _connect(ray: Any, address: str | None) -> None:  # noqa: ANN401 - the module
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    remedy = (
        "Start one (`ray start --head` here, `ray start --address HOST:6379` on the others), or "
        "name it: --ray-address HOST:PORT."
    )
    if address != "auto":
        _probe(address, remedy)
    try:
        # Workers' output stays in Ray's logs: stdout is for the summary.
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (
        ConnectionError,
        ValueError,
        RuntimeError,
        TimeoutError,
        ray.exceptions.RayError,
    ) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise UnavailableError(
            f"no Ray cluster {where} can be used: {_brief(error)}", remedy=remedy
        ) from error


def _probe(address: str, remedy: str) -> None:
    """Fail at once where nothing listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"--ray-address {address!r} is not host:port", remedy="For example 10.0.0.5:6379."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"no Ray cluster at {address}: {error}", remedy=remedy) from error


def _brief(error: Exception) -> str:
    """What Ray says without its pages: the first sentence, and the last line, the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    first = lines[0].split(". ")[0].rstrip(".")
    return (
        first if len(lines) == 1 else f"{first[:MAX_ERROR_CHARS]} ({lines[-1][:MAX_ERROR_CHARS]})"
    )


def _words(bundle: dict[str, int]) -> str:
    return " and ".join(f"{count} {name}" for name, count in bundle.items())

"""What a co-serving policy and an engine say to each other.

The engine shows itself before a step: the requests that hold blocks, the online ones that it would
admit now, and its free blocks. The policy answers with a `CoServingPlan`. All are plain values; a
*class* is online or offline, strictly: what offline work costs online requests is bounded by the
plan, never traded against how much offline work there is.

The engine keeps the two classes' queues: online requests wait in its own order (first come, first
served, or the fair policy of `aqua_schedulers.cfs`, for which offline requests do not exist and
their blocks are free), offline ones in the policy's `OfflineQueue`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple

from aqua_schedulers.cfs.views import Preemption
from aqua_schedulers.conserve.profile import StepLoad


class ServiceClass(StrEnum):
    """How a request is served: for a waiting person, or whenever there is room."""

    ONLINE = "online"
    OFFLINE = "offline"


class CoServedRequest(NamedTuple):
    """One request at the moment of the decision.

    Attributes:
        known_tokens: Prompt and output tokens that exist.
        computed_tokens: Those whose keys and values are in memory; of a waiting request, those that
            come back from its checkpoint.
        output_tokens: Generated so far.
        held_blocks: Blocks in memory; 0 when waiting.
        remaining_tokens: Output that is still to come, at most; what a deadline is reckoned with.
        finish_by_s: When an offline request is wanted, on the engine's clock.
        is_loading: Its blocks are on their way in; it cannot compute yet.
    """

    request_id: str
    service_class: ServiceClass
    arrival_s: float
    known_tokens: int
    computed_tokens: int = 0
    output_tokens: int = 0
    held_blocks: int = 0
    remaining_tokens: int = 0
    finish_by_s: float = inf
    is_loading: bool = False

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute until the next one is sampled; 1 for a decode."""
        return self.known_tokens - self.computed_tokens

    @property
    def is_decode(self) -> bool:
        """Whether it computes its latest token and nothing else."""
        return self.output_tokens > 0 and self.pending_tokens == 1


class CoServingView(NamedTuple):
    """The engine before a step.

    Attributes:
        free_blocks: Blocks that no request holds.
        max_tokens: Most tokens of a step.
        max_running: Requests that may hold blocks at once.
        running: Requests that hold blocks, in order of admission.
        arriving: Online requests that the engine admits now if they fit, in order.
        link_bytes_per_s: To and from the checkpoint store, each way.
        block_bytes: Of one block.
        store_room_blocks: What the checkpoint store still takes.
        runs_through: Whether a step without online requests may have to run to its end, though the
            engine can abort others.
    """

    now_s: float
    free_blocks: int
    block_count: int
    max_tokens: int
    max_running: int
    running: Sequence[CoServedRequest]
    arriving: Sequence[CoServedRequest] = ()
    link_bytes_per_s: float = 0.0
    block_bytes: int = 1
    store_room_blocks: int = 0
    runs_through: bool = False


class CoServingPlan(NamedTuple):
    """What the engine does before and in its step.

    Attributes:
        preempt: Offline requests to take out of memory before anything else. A swapped one's
            blocks are copied out first, while all wait; else what has no checkpoint is lost.
        online_tokens: Tokens that online requests may compute in this step.
        offline_tokens: Tokens of each offline request in this step, in order; one that runs and is
            not named is parked: it keeps its blocks and computes nothing.
        admit: Those of `offline_tokens` that wait and come in now.
        is_preemptible: No online request takes part: the step may be aborted at a safepoint.
        copy_out: Further full blocks of each offline request to copy to the checkpoint store.
        copy_in: Waiting offline requests to load in the background, with the blocks of this step.
        load: What the step computes if all online demand is met, for the arrival handler.
        online_load: What of it online requests compute.
        expected_s: What that is predicted to take.
        limit_s: What it was planned to keep to; infinity for none.
    """

    preempt: Sequence[Preemption] = ()
    online_tokens: int = 0
    offline_tokens: Mapping[str, int] = {}
    admit: Sequence[str] = ()
    is_preemptible: bool = False
    copy_out: Mapping[str, int] = {}
    copy_in: Mapping[str, int] = {}
    load: StepLoad = StepLoad()
    online_load: StepLoad = StepLoad()
    expected_s: float = 0.0
    limit_s: float = inf


NO_LIMIT: Final = inf
"""Fixed: a step may take as long as it takes, as one that can be aborted in the paper."""


class StepUnderWay(NamedTuple):
    """The step that is running when an online request arrives, as the engine publishes it.

    Attributes:
        start_s: When it was launched.
        load: As planned.
        expected_s: Its predicted duration.
        is_preemptible: Whether its safepoints are on.
        is_aborting: Whether an earlier arrival has aborted it.
    """

    start_s: float
    load: StepLoad
    expected_s: float
    is_preemptible: bool
    is_aborting: bool = False

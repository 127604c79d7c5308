"""Completely fair scheduling of prompts: who holds memory for the next turn.

An engine adapter (or the simulator) owns one `FairPolicy`, tells it events and asks it once per
step:

    policy = policy_named(PolicyName.CFS, FairSettings(block_tokens=16))
    policy.added(view)              # a request arrived
    policy.admitted(request_id)     # it holds blocks now, running or loading
    policy.preempted(view)          # it left the batch, whoever decided so
    policy.removed(request_id)      # finished or aborted
    if policy.begin_step():         # O(1); False: the last decision stands
        decision = policy.decide(EngineView(...))

Then the engine takes out `decision.preempt` and, until the next decision, admits nobody but
`decision.admit`, in that order, stopping at the first that finds no blocks. Requests just put out
are never in it. Those that are listed and not admitted stay listed.

Keep decoding requests before prompts in the running list: they take one token each and prompts
share the rest of the budget, which is section 7's partition of the batch.

`PolicyName.CFS` is the paper's policy, `PolicyName.LEAST_SERVED` the same taken word by word,
`PolicyName.FIRST_TOKEN` ours (`ranking`), `PolicyName.FCFS` what stock engines do. `turns` has the
rules that all but the last share, and what they promise.

Source: `Aqua: Network-Accelerated Memory Offloading for LLMs in Scale-Up GPU Domains`, section 7.
"""

from aqua_schedulers.cfs.policy import TimeSlicePolicy
from aqua_schedulers.cfs.ranking import (
    FairShare,
    FirstComeFirstServed,
    FirstTokenFirst,
    LeastServedFirst,
    Ranking,
)
from aqua_schedulers.cfs.registry import FairSettings, PolicyName, policy_named
from aqua_schedulers.cfs.views import (
    Decision,
    EngineView,
    Eviction,
    FairPolicy,
    PagingRates,
    PagingTier,
    Preemption,
    RequestView,
)

__all__ = [
    "Decision",
    "EngineView",
    "Eviction",
    "FairPolicy",
    "FairSettings",
    "FairShare",
    "FirstComeFirstServed",
    "FirstTokenFirst",
    "LeastServedFirst",
    "PagingRates",
    "PagingTier",
    "PolicyName",
    "Preemption",
    "Ranking",
    "RequestView",
    "TimeSlicePolicy",
    "policy_named",
]

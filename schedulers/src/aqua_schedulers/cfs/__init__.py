"""Completely fair scheduling of prompts: which requests hold memory for the next time slice.

An engine adapter (or the simulator) owns one `FairPolicy`, tells it events and asks it once per
step:

    policy = policy_named(PolicyName.CFS, FairSettings(), block_tokens=16)
    policy.added(view)              # a request arrived
    policy.admitted(request_id)     # it holds blocks now, running or loading
    policy.preempted(view)          # it left the batch, by the policy's decision or the engine's
    policy.removed(request_id, 40)  # finished or aborted, after 40 tokens of output
    if policy.begin_step():         # O(1); False: the last decision stands
        decision = policy.decide(EngineView(...))

Then the engine takes out `decision.preempt` and, until the next decision, admits only
`decision.admit`, in that order, stopping at the first that finds no blocks. Requests just preempted
are never in it. Those that are listed and not admitted stay listed.

Keep decoding requests before prompts in the running list: they take one token each and prompts
share the rest of the budget, which is section 7's partition of the batch.

`policy` decides at each slice's end: it lets a `time_slice` fill up, by a `ranking`, from the
running requests and the `waiting_queue`. `PolicyName.CFS` is the paper's policy,
`PolicyName.LEAST_SERVED` the same taken word by word, `PolicyName.FIRST_TOKEN` ours,
`PolicyName.FCFS` what stock engines do.

Whatever the policy, `FairSettings.tenants` shares the engine among tenants first, by the tokens
that each was served (`tenants`, `tenant_turns`).

Source: `Aqua: Network-Accelerated Memory Offloading for LLMs in Scale-Up GPU Domains`, section 7.
"""

from aqua_schedulers.cfs.policy import FairPolicy
from aqua_schedulers.cfs.registry import FairSettings, PolicyName, policy_named
from aqua_schedulers.cfs.tenants import TenantAccounts, TenantSettings
from aqua_schedulers.cfs.views import (
    Decision,
    EngineView,
    PagingRates,
    PagingTier,
    Preemption,
    PreemptionMode,
    RequestView,
)

__all__ = [
    "Decision",
    "EngineView",
    "FairPolicy",
    "FairSettings",
    "PagingRates",
    "PagingTier",
    "PolicyName",
    "Preemption",
    "PreemptionMode",
    "RequestView",
    "TenantAccounts",
    "TenantSettings",
    "policy_named",
]

"""Co-serving: one engine for online requests and for offline work in every gap.

An engine adapter (or the simulator) owns one policy, tells it what happens to offline requests, and
asks it before every step:

    profile = StepTimeProfile.parse(text)          # or None: a small fixed budget
    policy = co_serving_policy("guarded", Objectives(1.5, 0.11), profile)
    policy.added(request, now_s)                   # an offline request arrived
    plan = policy.plan(CoServingView(...))         # before a step
    policy.checkpoints.copy(request_id, blocks)    # for each of plan.copy_out
    policy.checkpoints.acknowledge(request_id, blocks)  # all workers have finished a copy
    policy.preempted(request, now_s)               # for each of plan.preempt
    policy.stepped(plan, load, seconds, now_s)     # a step ended
    policy.removed(request_id)                     # an offline request ended

When an online request arrives, `on_arrival` says whether it aborts the step under way (then:
`aborted`). Online requests among themselves are the business of `aqua_schedulers.cfs`: show it the
blocks of offline requests as free, and when it preempts, preempt all offline requests first.

`policy` is the unified scheduler, `readings` where the paper's (`conserve`) and ours (`guarded`)
differ, `priority` the stock engine with priorities; `profile` and `step_time` predict steps,
`profile_folder` finds profiles,
`checkpoints` and `offline_queue` keep the books of offline requests.

Source: `ConServe: Harvesting GPUs for Low-Latency and High-Throughput Large Language Model
Serving`.
"""

from aqua_schedulers.conserve.checkpoints import CheckpointLedger
from aqua_schedulers.conserve.policy import ConservePolicy
from aqua_schedulers.conserve.profile import (
    MeasuredStep,
    StepLoad,
    StepTimeProfile,
    fitted_profile,
)
from aqua_schedulers.conserve.profile_folder import StepTimeKey, find_profile
from aqua_schedulers.conserve.readings import Objectives
from aqua_schedulers.conserve.registry import CoServingPolicyName, co_serving_policy
from aqua_schedulers.conserve.settings import ConserveSettings
from aqua_schedulers.conserve.step_time import PredictionBasis, StepTimes
from aqua_schedulers.conserve.views import (
    CoServedRequest,
    CoServingPlan,
    CoServingView,
    ServiceClass,
    StepUnderWay,
)

__all__ = [
    "CheckpointLedger",
    "CoServedRequest",
    "CoServingPlan",
    "CoServingPolicyName",
    "CoServingView",
    "ConservePolicy",
    "ConserveSettings",
    "MeasuredStep",
    "Objectives",
    "PredictionBasis",
    "ServiceClass",
    "StepLoad",
    "StepTimeKey",
    "StepTimeProfile",
    "StepTimes",
    "StepUnderWay",
    "co_serving_policy",
    "find_profile",
    "fitted_profile",
]

"""BlendServe: offline requests ordered so that compute and memory time hide each other.

The way through: `RequestPool` (prompts as a `PrefixTree`, lengths as far as known) and a
`ResourceCost` go into `prepare`; the `PreparedPool` gives a policy for a runtime
(`aqua_schedulers.admission`), or parts for several engines (`split_among`).

Source: `BlendServe: Optimizing Offline Inference for Auto-regressive Large Models with
Resource-aware Batching`. `Mode.PAPER` is the policy as published, `Mode.FORESIGHT`, the default,
goes beyond it (`foresight`).
"""

from aqua_schedulers.blendserve.cost import ModelShape, ResourceCost
from aqua_schedulers.blendserve.foresight import ForesightBlend
from aqua_schedulers.blendserve.lengths import UNKNOWN, LengthEstimate, choose_sample
from aqua_schedulers.blendserve.order import BlendOrder, TreeResources
from aqua_schedulers.blendserve.paper import PaperBlend
from aqua_schedulers.blendserve.parallel import split_among
from aqua_schedulers.blendserve.pool import RequestPool
from aqua_schedulers.blendserve.preparation import Mode, PreparedPool, prepare
from aqua_schedulers.blendserve.runtime_tree import RuntimePrefixTree
from aqua_schedulers.blendserve.tree import PrefixTree

__all__ = [
    "UNKNOWN",
    "BlendOrder",
    "ForesightBlend",
    "LengthEstimate",
    "Mode",
    "ModelShape",
    "PaperBlend",
    "PrefixTree",
    "PreparedPool",
    "RequestPool",
    "ResourceCost",
    "RuntimePrefixTree",
    "TreeResources",
    "choose_sample",
    "prepare",
    "split_among",
]

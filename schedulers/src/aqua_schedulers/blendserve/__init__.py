"""BlendServe: offline requests ordered so that compute and memory time hide each other.

The way through: `RequestPool` (prompts as a `PrefixTree`, lengths as far as known) and a
`ResourceCost` go into `prepare`; the `PreparedPool` gives a policy for a runtime
(`aqua_schedulers.admission`), or parts for several engines (`split_among`).

Source: `BlendServe: Optimizing Offline Inference for Auto-regressive Large Models with
Resource-aware Batching`. `BlendMode.PAPER` is the policy as published,
`BlendMode.FORESIGHT`, the default, goes beyond it (`foresight`).
"""

from aqua_schedulers.blendserve.cost import ResourceCost
from aqua_schedulers.blendserve.foresight import ForesightBlend
from aqua_schedulers.blendserve.lengths import UNKNOWN, LengthEstimate, RequestPool, choose_sample
from aqua_schedulers.blendserve.order import BlendOrder, TreeResources
from aqua_schedulers.blendserve.paper import PaperBlend
from aqua_schedulers.blendserve.prefix_cache import PrefixCacheModel
from aqua_schedulers.blendserve.preparation import BlendMode, PreparedPool, prepare, split_among
from aqua_schedulers.blendserve.tree import PrefixTree

__all__ = [
    "UNKNOWN",
    "BlendMode",
    "BlendOrder",
    "ForesightBlend",
    "LengthEstimate",
    "PaperBlend",
    "PrefixCacheModel",
    "PrefixTree",
    "PreparedPool",
    "RequestPool",
    "ResourceCost",
    "TreeResources",
    "choose_sample",
    "prepare",
    "split_among",
]

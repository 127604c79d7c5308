"""RequestViews: vLLM's requests as the fair policy sees them.

At every slice's end all that run are looked at, so that is done column by column: a look at one
request after the other takes half as long again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final

from vllm.v1.request import RequestStatus

from aqua_schedulers.cfs import RequestView
from aqualib.engines.vllm.options import AquaOptions
from aqualib.engines.vllm.requests.priority import weight_of
from aqualib.engines.vllm.requests.tenant_key import tenant_of

_made_of: Callable[[Iterable[Any]], RequestView] = partial(tuple.__new__, RequestView)
"""Does what `RequestView._make` does, in half the time and unchecked."""


class RequestViews:
    """Makes views of requests.

    Args:
        options: The adapter's.
        managers: vLLM's, one for each group of the KV cache.
        max_tokens: Of a request.

    Attributes:
        tokens_per_new_block: Tokens after which a long request holds a block more; windows slide.
    """

    def __init__(self, options: AquaOptions, managers: Sequence[Any], max_tokens: int) -> None:
        self._options = options
        self._managers = managers
        # None is looked at where no tenants share.
        self._tenant_sources = () if options.tenants is None else options.tenant_sources
        growing: list[int] = [
            each.block_size for each in managers if not each.get_num_skipped_tokens(max_tokens)
        ]
        # With windows alone a request stops growing; until then it grows as if it had none.
        sizes = growing or [each.block_size for each in managers]
        self.tokens_per_new_block: Final = max(1, round(1 / sum(1 / size for size in sizes)))

    def holding(self, requests: Sequence[Any]) -> list[RequestView]:
        """Views of requests that hold memory, running or loading."""
        running = RequestStatus.RUNNING
        names = [each.request_id for each in requests]
        columns = zip(
            names,
            [each.arrival_time for each in requests],
            [each.num_prompt_tokens for each in requests],
            [each.num_output_tokens for each in requests],
            [each.num_computed_tokens for each in requests],
            self._held_blocks(names),
            repeat(0),
            [self._weight(each.priority) if each.priority else 1.0 for each in requests],
            [each.status is not running for each in requests],
            [self._tenant(each) for each in requests] if self._tenant_sources else repeat(""),
            strict=False,
        )
        return list(map(_made_of, columns))

    def waiting(self, request: Any, saved_tokens: int = 0) -> RequestView:
        """The view of a request that waits, of which so many tokens come back by a load."""
        return RequestView(
            request.request_id,
            request.arrival_time,
            request.num_prompt_tokens,
            request.num_output_tokens,
            saved_tokens,
            missing_blocks=self._blocks_of(request.num_tokens),
            weight=self._weight(request.priority) if request.priority else 1.0,
            tenant=self._tenant(request) if self._tenant_sources else "",
        )

    def _held_blocks(self, names: Iterable[str]) -> list[int]:
        """Blocks that come free with each request; those that others share do not."""
        first, *others = (each.req_to_blocks for each in self._managers)
        held = [[block.ref_cnt for block in first.get(name, ())].count(1) for name in names]
        for table in others:
            more = [[block.ref_cnt for block in table.get(name, ())].count(1) for name in names]
            held = [count + extra for count, extra in zip(held, more, strict=True)]
        return held

    def _blocks_of(self, tokens: int) -> int:
        """Blocks that the next token after so many reads, in all groups."""
        count = 0
        for each in self._managers:
            size: int = each.block_size
            count += -(-tokens // size) - int(each.get_num_skipped_tokens(tokens)) // size
        return count

    def _weight(self, priority: int) -> float:
        return weight_of(priority, self._options.urgent, self._options.priority_unit)

    def _tenant(self, request: Any) -> str:
        return tenant_of(request, self._tenant_sources)

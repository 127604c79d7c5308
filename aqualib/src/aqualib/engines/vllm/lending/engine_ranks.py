"""An engine's ranks, opened: beside its scheduler, or each in a process of its own.

One GPU's worker lives in the scheduler's process, as a rule, and is called. The workers of a tensor
or pipeline parallel engine, and that of a build for CPUs behind an API server, are processes of
their own on the same node; each listens at an address that follows from the engine's name. They are
found when the engine starts or not at all: workers of another node have their memory elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aqua_protocol import ConfigError
from aqualib.channel import ChannelClosedError
from aqualib.connection import open_producer
from aqualib.engines.vllm.lending.rank_memory import LocalMemory
from aqualib.engines.vllm.lending.rank_producers import RankProducers
from aqualib.engines.vllm.lending.remote_rank import RemoteRank
from aqualib.producer.profile_follower import ProfileFollower
from aqualib.settings import load_settings, socket_directory
from aqualib.topology import find_identity
from aqualib.transports.host import CPU

if TYPE_CHECKING:
    from pathlib import Path

    from aqualib.engines.vllm.lending.memory import LendableCache
    from aqualib.engines.vllm.lending.rank_memory import RankMemory
    from aqualib.producer.copy_limit import CopyRate
    from aqualib.producer.lender import Borrower, MemoryLender


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """What an engine lends with: its cache's parts, what offers them, and what borrows, if any.

    `take_pace` is what the next step tells ranks in other processes (`RankProducers.take_pace`).
    """

    memories: Sequence[RankMemory]
    lender: MemoryLender
    borrower: Borrower | None = None
    take_pace: Callable[[], CopyRate | None] = lambda: None


def rank_endpoint(vllm_config: Any, rank: int) -> Path:
    """Where a worker listens for its engine's lending; data-parallel engines are apart."""
    index = vllm_config.parallel_config.data_parallel_index
    directory = socket_directory(load_settings().socket_dir)
    return directory / f"lend-{vllm_config.instance_id}-{index}-{rank}.sock"


@contextmanager
def open_local(
    cache: LendableCache,
    model: str | None,
    profile_names: Sequence[str],
    member: str | None = None,
    borrower: Borrower | None = None,
) -> Iterator[EngineRanks]:
    """The one rank of an engine whose worker is in this process.

    Raises:
        ConfigError: A setting is wrong.
        TransportError: The producer's socket cannot be listened on.
    """
    with open_producer(
        member,
        device=str(cache.device),
        memory=cache.memory.account,
        model=model,
        profile_names=profile_names,
    ) as producer:
        yield EngineRanks([LocalMemory(cache)], producer, borrower)


@contextmanager
def open_remote(
    endpoints: Sequence[Path],
    model: str | None,
    profile_names: Sequence[str],
    members: Sequence[str | None] = (),
    *,
    is_borrowing: bool = False,
) -> Iterator[EngineRanks]:
    """The ranks of an engine whose workers are other processes; each becomes a member.

    Raises:
        ConfigError: A setting is wrong, a worker is not there, or they do not fit together.
        TransportError: A rank cannot open its producer.
    """
    settings = load_settings()
    identity = find_identity(settings, CPU, model)
    producer_id = f"{identity.node}-{os.getpid()}"
    names = [*members] or [None] * len(endpoints)
    ranks: list[RemoteRank] = []
    with ExitStack() as opened:
        for rank, endpoint in enumerate(endpoints):
            try:
                name = names[rank] or f"{producer_id}-rank{rank}"
                ranks.append(RemoteRank(rank, endpoint, producer_id=name, model=model))
            except (ChannelClosedError, FileNotFoundError) as error:
                raise _not_found(rank, error) from error
            opened.callback(ranks[-1].close)
        if len({rank.layout.slab_bytes for rank in ranks}) > 1:
            raise ConfigError("the ranks of this engine have slabs of different sizes")
        follower: ProfileFollower | None = None
        if profiles := [*profile_names] or [*filter(None, [model])]:
            link = opened.enter_context(settings.coordinator_client())
            follower = opened.enter_context(
                ProfileFollower(link, profiles, max_age_s=settings.profile_max_age_s)
            )
        lender = RankProducers(
            ranks,
            producer_id=producer_id,
            identity=replace(identity, gpu_uuid=",".join(r.layout.gpu_uuid for r in ranks)),
            profile_follower=follower,
            harm_share=settings.harm_share,
        )
        opened.callback(lender.close)
        yield EngineRanks(ranks, lender, lender if is_borrowing else None, lender.take_pace)


def _not_found(rank: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"this engine's KV cache cannot be lent: no worker of rank {rank} is here ({error})",
        remedy="Add --worker-cls aqualib.engines.vllm.LendingWorker. All workers have to run on "
        'the node of their scheduler and as its user; where they do not, drop "lend".',
    )

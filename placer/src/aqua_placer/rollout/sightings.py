"""What the coordinator sees of a plan's groups, and which domain each server of the plan is.

The coordinator knows members by name, node, domain and GPU; a plan knows groups by server and
number of the GPU. A mapping joins the two exactly. Without one, servers are told by their members:
each server is the domain in which most of its members are, chosen so that over the whole cluster
the fewest are elsewhere (servers of a class are interchangeable, so any such choice is right).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from aqua_client import CoordinatorClient
from aqua_placer.bounds.linear_program import LinearModel, solve
from aqua_placer.budget import Budget
from aqua_placer.rollout.mapping import ClusterMapping
from aqua_placer.rollout.positions import Position, members_of

MATCH_WITHIN_S = 60.0
"""Seconds for the choice of domains, which takes milliseconds for 1,000 servers; bounds a mistake.
Doubled, one is noticed later."""


@dataclass(frozen=True)
class Sighting:
    """A member as the books have it; it may be both producer and consumer."""

    name: str
    node: str
    domain: str
    gpu_uuid: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class ClusterView:
    """All members at one time."""

    members: Mapping[str, Sighting]

    @classmethod
    def read(cls, client: CoordinatorClient) -> ClusterView:
        """Ask the coordinator.

        Raises:
            AquaError: What it answered, as its own type.
        """
        lenders = {
            view.producer_id: Sighting(
                view.producer_id, view.node, view.domain, view.gpu_uuid, ("producer",)
            )
            for view in client.list_producers()
        }
        members = dict(lenders)
        for view in client.list_consumers():
            name = view.consumer_id
            roles = ("producer", "consumer") if name in lenders else ("consumer",)
            members[name] = Sighting(name, view.node, view.domain, view.gpu_uuid, roles)
        return cls(members)

    def of_group(self, group: str, shard_count: int) -> list[Sighting]:
        """Members of a group that are there."""
        names = members_of(group, shard_count)
        return [self.members[name] for name in names if name in self.members]


@dataclass(frozen=True)
class Sites:
    """Where servers of a plan are.

    Attributes:
        mapping: Says it for some or all.
        domains: Domain of each server that has members where nothing else is said.
    """

    mapping: ClusterMapping
    domains: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def found(
        cls, positions: Mapping[str, Position], view: ClusterView, mapping: ClusterMapping
    ) -> Sites:
        """Tell servers by their members."""
        seen: Counter[tuple[str, str]] = Counter()
        for group, position in positions.items():
            for member in view.of_group(group, len(position.gpus)):
                seen[position.server, member.domain] += 1
        return cls(mapping, _most_at_home(seen))

    def is_exact(self, server: str) -> bool:
        """Whether the mapping says where a server is."""
        told = self.mapping.server(server)
        return told.node is not None or told.gpus is not None

    def misplaced(self, member: Sighting, server: str, gpu: int) -> tuple[str, str] | None:
        """Where a member should be and where it is instead; None where it is as planned.

        A server of which nothing is known may be any domain that is no other server's.
        """
        told = self.mapping.server(server)
        if told.gpus is not None and gpu < len(told.gpus):
            wanted, is_at = told.gpus[gpu], member.gpu_uuid
            return None if wanted == is_at else (f"GPU {gpu} of {server} ({wanted})", is_at)
        if told.node is not None:
            if member.node == told.node:
                return None
            return f"{server} (node {told.node})", f"node {member.node}"
        domain = self.domains.get(server)
        if domain == member.domain:
            return None
        is_at = f"domain {member.domain} of node {member.node}"
        if domain is not None:
            return f"{server} (domain {domain})", is_at
        rivals = [name for name, other in self.domains.items() if other == member.domain]
        return (server, f"{is_at}, which is {rivals[0]}") if rivals else None


def _most_at_home(seen: Counter[tuple[str, str]]) -> dict[str, str]:
    """A domain for each server, none for two, so that the most members are at home.

    An assignment problem, as a linear program: its vertices are whole.
    """
    pairs = sorted(seen)
    if not pairs:
        return {}
    servers = _numbered(server for server, _ in pairs)
    domains = _numbered(domain for _, domain in pairs)
    rows = len(servers) + len(domains)
    index = [(servers[server], len(servers) + domains[domain]) for server, domain in pairs]
    model = LinearModel(
        cost=-np.array([seen[pair] for pair in pairs], dtype=np.float64),
        lower=np.zeros(len(pairs)),
        upper=np.ones(len(pairs)),
        starts=np.arange(0, 2 * len(pairs) + 1, 2, dtype=np.int64),
        index=np.array(index, dtype=np.int64).ravel(),
        values=np.ones(2 * len(pairs)),
        row_lower=np.zeros(rows),
        row_upper=np.ones(rows),
    )
    answer = solve(model, Budget(MATCH_WITHIN_S))
    assert answer.x is not None, ("each server may be no domain at all", answer.verdict)
    return {
        server: domain
        for (server, domain), chosen in zip(pairs, answer.x.tolist(), strict=True)
        if round(chosen)
    }


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}

"""The walk over a re-placement's steps: hook, look, next; stoppable anywhere, and resumable.

Before the first step the cluster has to be where the plan begins, so that no plan of yesterday is
carried out on today's cluster. A step is done when the coordinator sees it: its group is gone
(`park`, `stop`), or all of its members report from where the step leads. Only then the next one
begins, because it may need the GPUs that this one has left. A step whose hook had begun when the
last run ended is looked at first and not begun again if it has arrived. Behind the last step the
plan's matches are pushed, and the result is compared with the plan.

The coordinator may be away for a while in the middle; a step is confirmed when it is back, or times
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from aqua_client import CoordinatorClient
from aqua_placer.errors import StartDiffersError, StepUnconfirmedError
from aqua_placer.plan.files import pairings_of
from aqua_placer.rollout.drift import DriftKind, member_drift
from aqua_placer.rollout.hook import Hook, told
from aqua_placer.rollout.journal import RolloutJournal
from aqua_placer.rollout.mapping import ClusterMapping
from aqua_placer.rollout.positions import Position, members_of, positions_after, target_of
from aqua_placer.rollout.sightings import ClusterView, Sites
from aqua_protocol.errors import UnavailableError
from aqua_protocol.plan import Move, Plan

POLL_S = 0.5
"""Seconds between looks at the coordinator: members report every second. Doubled, each step takes
that much longer at most."""

MAX_TOLD = 3
"""Differences in one message. Doubled, it is longer; `aqua place drift` lists all."""


@dataclass
class Walk:
    """One run over the steps of a plan.

    Attributes:
        quiet_groups: Groups that neither lend nor borrow, whom the coordinator never sees: their
            hook alone says that a step is done.
        confirm_s: Seconds until the coordinator has to see the result of a step.
        on_step: Is told of each step, in words, and how many are done.
    """

    plan: Plan
    client: CoordinatorClient
    mapping: ClusterMapping
    hook: Hook
    journal: RolloutJournal
    confirm_s: float
    quiet_groups: Collection[str] = ()
    on_step: Callable[[int, str], None] = lambda _done, _note: None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def run(self) -> int:
        """Walk to the end; returns how many steps were done in this run.

        Raises:
            StartDiffersError: The cluster is not where the next step begins; nothing was done.
            StepFailedError: A hook did not end well.
            StepUnconfirmedError: A hook ended well, but its result is not seen.
            AquaError: What the coordinator answered, as its own type.
            KeyboardInterrupt: Ctrl-C; the journal knows how far it came.
        """
        first = self.journal.confirmed_count
        pairings = pairings_of(self.plan)  # Before anything moves: it may refuse a name.
        self._require_start(first)
        for move in self.plan.moves[first:]:
            self.on_step(move.step, told(move, len(self.plan.moves)))
            self._take(move)
        if not self.journal.is_pushed:
            self.client.put_placements(pairings)
            self.journal.pushed()
        self.on_step(len(self.plan.moves), "done")
        return len(self.plan.moves) - first

    def _require_start(self, done: int) -> None:
        """Refuse a cluster whose moving groups are not where the plan has them now."""
        moves = self.plan.moves[done:]
        moving = {move.group for move in moves} - set(self.quiet_groups)
        if self.journal.begun is not None:  # It may be anywhere between.
            moving.discard(moves[0].group)
        positions = positions_after(self.plan, done)
        view = ClusterView.read(self.client)
        sites = Sites.found(positions, view, self.mapping)
        own = {group: positions[group] for group in positions if group in moving}
        wrong = [
            f"{one.subject} should be {one.planned}, {one.seen}"
            for one in member_drift(own, {}, view, sites)
            if one.kind is not DriftKind.MEMBER_UNPLANNED
        ]
        early = [
            f"{member.name} runs before its step"
            for move in moves
            if move.group in moving and move.group not in positions
            for member in view.of_group(move.group, len(move.to_gpus))
        ]
        if wrong := wrong + early:
            more = f" and {len(wrong) - MAX_TOLD} more" if len(wrong) > MAX_TOLD else ""
            raise StartDiffersError(
                f"the cluster is not where step {done} begins: {'; '.join(wrong[:MAX_TOLD])}{more}",
                remedy="Plan anew from where groups are now, with `replan`; `aqua place drift "
                f"PLAN --after-step {done}` lists what differs.",
                differences=wrong,
            )

    def _take(self, move: Move) -> None:
        """Carry one step out, unless the run before did, and have it confirmed."""
        before = self.journal.begun
        is_seen = before is not None and move.group not in self.quiet_groups
        if before is None or not is_seen or self._what_lacks(move, before) is not None:
            if before is None:
                view = ClusterView.read(self.client)
                seen = view.of_group(move.group, len(move.from_gpus))
                before = {member.name: member.domain for member in seen}
                self.journal.begin(move.step, before)
            self.hook.run(move, len(self.plan.moves), self.mapping, self.journal.file)
            self._confirm(move, before)
        self.journal.confirm(move.step)

    def _confirm(self, move: Move, before: dict[str, str]) -> None:
        give_up_at_s = self.clock() + self.confirm_s
        while (lacks := self._what_lacks(move, before)) is not None:
            if self.clock() >= give_up_at_s:
                raise StepUnconfirmedError(
                    f"the hook of {told(move, len(self.plan.moves))} ended well, but after "
                    f"{self.confirm_s:g} s {lacks}",
                    remedy="Look at the pods of this group and their logs (AQUA_MEMBER, "
                    "AQUA_COORDINATOR_URL). Then run the same command again: it looks first, and "
                    "calls the hook again only if that is still so.",
                    step=move.step,
                )
            self.sleep(POLL_S)

    def _what_lacks(self, move: Move, before: dict[str, str]) -> str | None:
        """Why a step is not done yet, None when it is."""
        if move.group in self.quiet_groups:
            return None
        try:
            view = ClusterView.read(self.client)
        except UnavailableError as error:
            return f"the coordinator does not answer ({error.message})"
        target = target_of(move)
        if target is None:
            left = view.of_group(move.group, len(move.from_gpus))
            return f"{left[0].name} still reports" if left else None
        return self._where_lacks(move, target, view, before)

    def _where_lacks(
        self, move: Move, target: Position, view: ClusterView, before: dict[str, str]
    ) -> str | None:
        """Why a group is not where its step leads, None when all of it is."""
        others = positions_after(self.plan, move.step + 1)
        others.pop(move.group)
        sites = Sites.found(others, view, self.mapping)
        # An unknown server may be any domain, but not the one that the group is to leave.
        leaves = move.from_server not in {None, move.to_server} and not sites.is_exact(
            target.server
        )
        domains: set[str] = set()
        for name, gpu in zip(members_of(move.group, len(target.gpus)), target.gpus, strict=True):
            member = view.members.get(name)
            if member is None:
                return f"{name} does not report"
            if (elsewhere := sites.misplaced(member, target.server, gpu)) is not None:
                return f"{name} is not on {elsewhere[0]} but on {elsewhere[1]}"
            if leaves and before.get(name) == member.domain:
                return f"{name} is where it was, on domain {member.domain}"
            domains.add(member.domain)
        return f"its members are in {len(domains)} domains" if len(domains) > 1 else None

"""Why a match is as it is, in one line; the long answers are in `explaining`."""

from __future__ import annotations

from aqua_placer.coverage.matching import Borrower, Lender, ServerMatch, Service
from aqua_placer.problem.instance import GRAIN_GB
from aqua_protocol.plan import MatchingMode

CHOICE = {
    MatchingMode.STABLE: "largest need with most spare",
    MatchingMode.EXACT: "part of the matching that covers most",
    MatchingMode.BEST_FIT: "smallest producer that suffices",
    MatchingMode.LINKS: "best of spare times link bandwidth",
}


def match_reason(service: Service, lender: Lender, mode: MatchingMode) -> str:
    """One line for one producer of a consumer group."""
    need, covered = service.borrower.gb, service.covered_gb
    why = CHOICE[mode]
    if service.borrower.shards > 1:
        why = f"one of {service.borrower.shards} producers in lockstep"
    told = f"{why}: lends {covered:g} of the {need:g} GB needed, has {lender.gb:g} GB"
    if covered < min(lender.gb, need) - GRAIN_GB:
        return f"{told}; the weakest of the {service.borrower.shards} has {covered:g} GB"
    return told


def unmatched_reason(match: ServerMatch, borrower: Borrower) -> str:
    """One line for a consumer group without producers."""
    lenders = sum(len(service.lenders) for service in match.services) + len(match.idle)
    if not lenders:
        return "no producer on this server"
    if len(match.idle) < borrower.shards <= lenders:
        if match.idle:
            return (
                f"needs {borrower.shards} producers at once, {len(match.idle)} are left beside "
                "consumers that cover more"
            )
        return f"all {lenders} producer shards here serve consumers that cover more"
    return f"needs {borrower.shards} producers at once, this server has {lenders}"

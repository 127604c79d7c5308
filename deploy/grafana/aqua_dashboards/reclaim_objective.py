"""Reclaim objective: do lenders get their memory back in time, and where does the time go?"""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from aqua_dashboards.panels import Query, buckets, choice, dashboard, lines, number

OF: Final = 'namespace=~"$namespace"'
ALLOWED: Final = 0.01
"""Part of reclaims that may be late, as in the alerts. Doubled, the budget lasts twice as long."""
TOTAL: Final = "aqua_reclaim_duration_seconds"
FIRST: Final = "aqua_reclaim_first_slab_seconds"


def reclaim_objective() -> Dashboard:
    """The objective, its budget, and the phases of a reclaim."""
    board = dashboard(
        "aqua-reclaim-slo",
        "Aqua / Reclaim SLO",
        "Lenders get their memory back within a second, 99 times of 100. What is spent of that, "
        "and where the time goes.",
    ).with_variable(
        choice("namespace", "Installation", "label_values(aqua_coordinator_info, namespace)")
    )
    return _outcomes(_phases(_objective(board)))


def _objective(board: Dashboard) -> Dashboard:
    late = "namespace:aqua_reclaims_late:ratio_rate"
    board = board.with_row(Row("Objective"))
    for window, words in (("1h", "hour"), ("6h", "six hours"), ("3d", "three days")):
        board = board.with_panel(
            number(
                f"Late, last {words}",
                "Part of reclaims that took longer than a second, from the producer's decision to "
                "its last slab. The objective is 1 %.",
                "percentunit",
                f"max({late}{window}{{{OF}}})",
                bad_above=ALLOWED,
            )
        )
    return (
        board.with_panel(
            number(
                "Budget left",
                "Of the late reclaims that the objective allows in three days, the part that is "
                "left. Below zero the objective is missed.",
                "percentunit",
                f"1 - max({late}3d{{{OF}}}) / {ALLOWED}",
            )
        )
        .with_panel(
            number(
                "Reclaims",
                "Closed within the range shown.",
                "short",
                f"sum(increase(aqua_reclaims_total{{{OF}}}[$__range]))",
            )
        )
        .with_panel(
            number(
                "Past their deadline",
                "Reclaims within the range shown in which a consumer overran its deadline.",
                "short",
                f'sum(increase(aqua_reclaims_total{{{OF},outcome="escalated"}}[$__range]))',
                bad_above=1,
            )
        )
        .with_panel(
            lines(
                "Late reclaims",
                "Part of reclaims that took longer than a second, over windows of the alerts. Both "
                "5 minutes and an hour above 14.4 % page.",
                "percentunit",
                *(
                    Query(f"max by (namespace) ({late}{window}{{{OF}}})", window)
                    for window in ("5m", "1h", "6h", "3d")
                ),
                span=24,
            )
        )
    )


def _phases(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Where the time goes"))
        .with_panel(
            lines(
                "To the first slab",
                "From the decision to the first slab that is back: messages, and the consumer's "
                "copy of one slab. Independent of how much is taken back.",
                "s",
                *_quantiles(FIRST),
            )
        )
        .with_panel(
            lines(
                "To the last slab",
                "From the decision until all of it is back: grows with the amount, and with what "
                "consumers move to host memory.",
                "s",
                *_quantiles(TOTAL),
            )
        )
        .with_panel(
            lines(
                "Phases of a reclaim, mean",
                "As the producer measures: to the first slab, and from there to the last. As the "
                "engine sees it: until it had its blocks, of vLLMs that lend. As a borrowing vLLM "
                "sees it: from the demand until its last slab was given back.",
                "s",
                Query(
                    f"sum(rate({FIRST}_sum{{{OF}}}[$__rate_interval]))"
                    f" / sum(rate({FIRST}_count{{{OF}}}[$__rate_interval]))",
                    "first slab",
                ),
                Query(
                    f"sum(rate({TOTAL}_sum{{{OF}}}[$__rate_interval]))"
                    f" / sum(rate({TOTAL}_count{{{OF}}}[$__rate_interval]))",
                    "last slab",
                ),
                Query(
                    "sum(rate(aqua_lender_reclaim_seconds_total[$__rate_interval]))"
                    " / sum(rate(aqua_lender_reclaims_total[$__rate_interval]))",
                    "engine has its blocks",
                ),
            )
        )
        .with_panel(
            lines(
                "Consumers at work on reclaims",
                "Seconds a second that borrowing vLLMs spend giving memory back, and bytes that "
                "they move away from peers meanwhile.",
                "short",
                Query(
                    "sum by (pod) (rate(aqua:kv_reclaim_seconds_total[$__rate_interval]))",
                    "{{pod}} s/s",
                ),
                Query(
                    "sum by (pod) (rate(aqua:kv_drained_bytes_total[$__rate_interval])) / 1048576",
                    "{{pod}} MiB/s",
                ),
            )
        )
        .with_panel(
            buckets(
                "Durations of reclaims",
                "How many reclaims took how long. A second band far above the first: some "
                "consumers are slow, not all.",
                "s",
                f"sum by (le) (increase({TOTAL}_bucket{{{OF}}}[$__rate_interval]))",
            )
        )
    )


def _outcomes(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Outcomes"))
        .with_panel(
            lines(
                "Reclaims by outcome",
                "Returned: in time. Escalated: a consumer overran the deadline. Dropped: the "
                "producer left with the reclaim open.",
                "short",
                Query(
                    f"sum by (outcome) (increase(aqua_reclaims_total{{{OF}}}[$__rate_interval]))",
                    "{{outcome}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Open reclaims",
                "Under way, or not taken up by their producer. A line that stays up is a reclaim "
                "that hangs.",
                "short",
                Query(f"max by (namespace) (aqua_reclaim_pending{{{OF}}})", "{{namespace}}"),
            )
        )
        .with_panel(
            lines(
                "Memory taken back",
                "Bytes a second that engines got back, by engine.",
                "Bps",
                Query(
                    "sum by (pod) (rate(aqua_lender_reclaimed_bytes_total[$__rate_interval]))",
                    "{{pod}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Kept past a deadline",
                "Memory that consumers hold although it was asked back and the deadline is over, "
                "by lender.",
                "bytes",
                Query("sum by (pod) (aqua_lender_quarantined_bytes)", "{{pod}}"),
            )
        )
    )


def _quantiles(name: str) -> list[Query]:
    return [
        Query(
            f"histogram_quantile({part}, sum by (le) (rate({name}_bucket{{{OF}}}"
            "[$__rate_interval])))",
            label,
        )
        for part, label in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    ]

"""Harm guard: does lending slow the lender?"""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from aqua_dashboards.panels import Query, dashboard, engine_choices, lines, number

OF: Final = 'namespace=~"$namespace",pod=~"$pod"'
STEPS: Final = "aqua_lender_step_duration_seconds"
SLOWDOWN: Final = f"pod:aqua_lender_step_slowdown:ratio_rate15m{{{OF}}}"
BESIDE: Final = f"pod:aqua_lender_requests_waiting_beside_loans:sum{{{OF}}}"


def harm_guard() -> Dashboard:
    """Engines that lend: their steps, latencies and queues, with loans and without."""
    board = engine_choices(
        dashboard(
            "aqua-harm-guard",
            "Aqua / Harm guard",
            "Does lending slow the lender? Its steps with loans, compared with steps of as many "
            "tokens without; its queue and latencies beside what it has lent.",
        )
    )
    return _requests(_steps(_verdict(board)))


def _verdict(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Verdict"))
        .with_panel(
            number(
                "Worst slow-down",
                "Time that steps of the last 15 minutes took with loans, over the time that as "
                "many steps of as many tokens took without, in the last six hours. 1.0: lending "
                "costs nothing. Of the engine that it slows most.",
                "percentunit",
                f"max({SLOWDOWN})",
                bad_above=1.1,
            )
        )
        .with_panel(
            number(
                "Waiting beside loans",
                "Requests that wait at engines whose memory is lent at this moment. They should "
                "get it back within a second.",
                "short",
                f"sum({BESIDE}) or vector(0)",
                bad_above=1,
            )
        )
        .with_panel(
            number(
                "Lent",
                "Memory of these engines that consumers hold.",
                "bytes",
                f"sum(aqua_lender_leased_bytes{{{OF}}})",
            )
        )
        .with_panel(
            number(
                "Kept past a deadline",
                "Memory that consumers have not given back in time: the engine does without.",
                "bytes",
                f"sum(aqua_lender_quarantined_bytes{{{OF}}})",
                bad_above=1,
            )
        )
        .with_panel(
            number(
                "KV blocks away",
                "Blocks of KV cache that these engines do without, lent or about to be.",
                "short",
                f"sum(aqua_lender_absent_blocks{{{OF}}})",
            )
        )
        .with_panel(
            number(
                "Time to get memory back",
                "Mean over the range shown, from the decision until the engine had its blocks.",
                "s",
                f"sum(increase(aqua_lender_reclaim_seconds_total{{{OF}}}[$__range]))"
                f" / sum(increase(aqua_lender_reclaims_total{{{OF}}}[$__range]))",
                bad_above=1,
            )
        )
    )


def _steps(board: Dashboard) -> Dashboard:
    mean = (
        f"sum by (pod, loans, tokens) (rate({STEPS}_sum{{{OF}}}[$__rate_interval]))"
        f" / (sum by (pod, loans, tokens) (rate({STEPS}_count{{{OF}}}[$__rate_interval])) > 0)"
    )
    return (
        board.with_row(Row("Steps"))
        .with_panel(
            lines(
                "Slow-down by lending",
                "As above, for each engine. Above 1.1 for 15 minutes an alert fires. A little "
                "below 1 is common: with loans an engine has less to do.",
                "percentunit",
                Query(SLOWDOWN, "{{pod}}"),
            )
        )
        .with_panel(
            lines(
                "Mean step by loans and tokens",
                "Compare lines of one number of tokens: none, held and reclaiming should lie on "
                "each other. Reclaiming apart from held: taking memory back disturbs steps. Held "
                "apart from none: the borrowers' copies take memory bandwidth.",
                "s",
                Query(mean, "{{pod}} {{tokens}} tokens, {{loans}}"),
            )
        )
        .with_panel(
            lines(
                "p99 step by loans",
                "Of all steps. Steps with loans are those of quiet times, so this is for "
                "outliers; compare means above.",
                "s",
                Query(
                    f"histogram_quantile(0.99, sum by (pod, loans, le) (rate({STEPS}_bucket{{{OF}}}"
                    "[$__rate_interval])))",
                    "{{pod}} {{loans}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Memory bandwidth of the GPU",
                "Part of the time in which memory was busy, by DCGM: the engine's own steps and "
                "what borrowers copy.",
                "percentunit",
                Query(f"max by (pod, UUID) (DCGM_FI_PROF_DRAM_ACTIVE{{{OF}}})", "{{pod}} {{UUID}}"),
                highest=1,
            )
        )
    )


def _requests(board: Dashboard) -> Dashboard:
    first = "pod:vllm_time_to_first_token_seconds"
    return (
        board.with_row(Row("Requests"))
        .with_panel(
            lines(
                "Waiting requests and lent memory",
                "A queue should end what is lent. Both for long at a time: the reclaim hangs, or "
                "the queue has another reason than memory.",
                "short",
                Query(f"pod:vllm_requests_waiting:sum{{{OF}}}", "{{pod}} waiting"),
                Query(
                    f"sum by (pod) (aqua_lender_leased_bytes{{{OF}}}) / 1073741824",
                    "{{pod}} lent, GiB",
                ),
            )
        )
        .with_panel(
            lines(
                "Time to first token, p99, with loans and without",
                "vLLM's own, at times when its memory was lent and at others. Engines lend when "
                "they are quiet: with loans it should be the lower one.",
                "s",
                Query(f"{first}_with_loans:p99_rate5m{{{OF}}}", "{{pod}} with loans"),
                Query(f"{first}_without_loans:p99_rate5m{{{OF}}}", "{{pod}} without"),
            )
        )
        .with_panel(
            lines(
                "Preemptions",
                "Requests a second that vLLM put out for want of KV cache. They should not rise "
                "while memory is lent.",
                "reqps",
                Query(
                    f"sum by (pod) (rate(vllm:num_preemptions_total{{{OF}}}[$__rate_interval])"
                    f" and on (namespace, pod) aqua_lender_info{{{OF}}})",
                    "{{pod}}",
                ),
            )
        )
        .with_panel(
            lines(
                "KV cache in use",
                "By vLLM, of the blocks that are there: what is lent does not count.",
                "percentunit",
                Query(
                    f"max by (pod) (vllm:kv_cache_usage_perc{{{OF}}}"
                    f" and on (namespace, pod) aqua_lender_info{{{OF}}})",
                    "{{pod}}",
                ),
                highest=1,
            )
        )
    )

"""Engine view: vLLM's own series beside Aqua's and DCGM's, engine by engine; co-serving last."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from aqua_dashboards.panels import Query, dashboard, engine_choices, lines

OF: Final = 'namespace=~"$namespace",pod=~"$pod"'


def engines() -> Dashboard:
    """Load, latency, paging and memory of each engine."""
    board = engine_choices(
        dashboard(
            "aqua-engines",
            "Aqua / Engines",
            "vLLM's load and latency, what Aqua pages and lends for it, and what its GPU holds.",
        )
    )
    return _step_aborts(_co_serving(_paging(_memory(_load(board)))))


def _load(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Load and latency"))
        .with_panel(
            lines(
                "Requests",
                "Running and waiting, by vLLM.",
                "short",
                Query(f"pod:vllm_requests_running:sum{{{OF}}}", "{{pod}} running"),
                Query(f"pod:vllm_requests_waiting:sum{{{OF}}}", "{{pod}} waiting"),
            )
        )
        .with_panel(
            lines(
                "Tokens",
                "Generated tokens a second.",
                "short",
                Query(
                    f"sum by (pod) (rate(vllm:generation_tokens_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Time to first token, p99",
                "What a user waits for the first word. Time slices are there to keep it short when "
                "memory is not enough for all. Where there are offline requests, they are in it: "
                "what online ones get is below, at co-serving.",
                "s",
                Query(f"pod:vllm_time_to_first_token_seconds:p99_rate5m{{{OF}}}", "{{pod}}"),
            )
        )
        .with_panel(
            lines(
                "Time between tokens, p99",
                "Time slices lengthen it for those that are put out, and nothing else should. "
                "Offline requests, which are parked, are in it where there are any.",
                "s",
                Query(f"pod:vllm_inter_token_latency_seconds:p99_rate5m{{{OF}}}", "{{pod}}"),
            )
        )
    )


def _memory(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Memory"))
        .with_panel(
            lines(
                "Borrowed, lent and spilled",
                "By the books, for the GPU that the engine is on.",
                "bytes",
                Query(f"sum by (pod) (pod:aqua_borrowed_bytes:max{{{OF}}})", "{{pod}} borrowed"),
                Query(f"sum by (pod) (pod:aqua_leased_out_bytes:max{{{OF}}})", "{{pod}} lent"),
                Query(
                    f"sum by (pod) (pod:aqua_spilled_host_bytes:max{{{OF}}})",
                    "{{pod}} in host memory",
                ),
            )
        )
        .with_panel(
            lines(
                "Memory in use on the GPU",
                "By DCGM. Lent memory is in use, too: what an engine lends and no one holds is "
                "free only on the books.",
                "bytes",
                Query(
                    f"pod:dcgm_fb_used_bytes:max{{{OF}}}",
                    "{{pod}} {{gpu_uuid}}",
                ),
            )
        )
        .with_panel(
            lines(
                "KV cache in use",
                "By vLLM, of the blocks that are there. Near 1 requests wait, or are put out.",
                "percentunit",
                Query(f"max by (pod) (vllm:kv_cache_usage_perc{{{OF}}})", "{{pod}}"),
                highest=1,
            )
        )
        .with_panel(
            lines(
                "GPU at work",
                "Part of the time in which the GPU computed, by DCGM.",
                "percent",
                Query(f"max by (pod, UUID) (DCGM_FI_DEV_GPU_UTIL{{{OF}}})", "{{pod}} {{UUID}}"),
                highest=100,
            )
        )
    )


def _paging(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Paging"))
        .with_panel(
            lines(
                "KV paged",
                "Bytes a second from the engine to peers or host memory, and back.",
                "Bps",
                *(
                    Query(
                        f"sum by (pod) (rate(aqua:kv_paged_{way}_bytes_total{{{OF}}}"
                        "[$__rate_interval]))",
                        f"{{{{pod}}}} {way}",
                    )
                    for way in ("out", "in")
                ),
            )
        )
        .with_panel(
            lines(
                "Time spent paging",
                "Seconds a second, summed over workers: the part of its time that an engine spends "
                "on copies.",
                "percentunit",
                Query(
                    f"sum by (pod) (rate(aqua:kv_paging_seconds_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Preemptions",
                "By Aqua, at the end of a slice; and by vLLM in all, those for want of memory "
                "included.",
                "reqps",
                Query(
                    f"sum by (pod) (rate(aqua:forced_preemptions_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}} end of a slice",
                ),
                Query(
                    f"sum by (pod) (rate(vllm:num_preemptions_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}} all",
                ),
            )
        )
        .with_panel(
            lines(
                "Tokens that were not computed again",
                "Loaded after a preemption, and loaded from the prefix tier.",
                "short",
                Query(
                    f"sum by (pod) (rate(aqua:restored_tokens_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}} after a preemption",
                ),
                Query(
                    f"sum by (pod) (rate(aqua:prefix_hit_tokens_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}} of a prefix",
                ),
            )
        )
        .with_panel(
            lines(
                "Blocks dropped or lost",
                "Dropped for want of room in the store, or not there when they were needed. Each "
                "is computed again.",
                "short",
                Query(
                    f"sum by (pod) (rate(aqua:unsaved_blocks_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}} dropped",
                ),
                Query(
                    f"sum by (pod) (rate(aqua:lost_blocks_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}} lost",
                ),
            )
        )
        .with_panel(
            lines(
                "Rate of the path to peers",
                "Measured when a lease begins, of the slowest path in use: programs that serve "
                "their consumer's own metrics. Far below what NVLink gives: copies take another "
                "way.",
                "Bps",
                Query(
                    f"min by (pod, transport, direction) (aqua_ipc_link_bytes_per_second{{{OF}}})",
                    "{{pod}} {{transport}} {{direction}}",
                ),
            )
        )
    )


def _co_serving(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Co-serving"))
        .with_panel(
            lines(
                "Online requests within their objectives",
                "Of online requests, those with their first token within ttft_s, and those with no "
                "more than tpot_s between tokens in the mean; of the last 15 minutes, by the "
                "objectives that the engine was given.",
                "percentunit",
                Query(f"pod:aqua_online_attainment:ratio_rate15m{{{OF}}}", "{{pod}} {{objective}}"),
                highest=1,
            )
        )
        .with_panel(
            lines(
                "Offline requests that ended",
                "Answered, or left by their clients. They have no objective: what they get done is "
                "what online ones leave.",
                "reqps",
                Query(
                    f"sum by (pod) (rate(aqua:offline_requests_ended_total{{{OF}}}"
                    "[$__rate_interval]))",
                    "{{pod}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Tokens of offline requests",
                "Computed for offline requests a second, prompts and answers, in the gaps that "
                "online requests leave.",
                "short",
                Query(
                    f"sum by (pod) (rate(aqua:offline_tokens_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Steps that overran",
                "Of all steps those with offline work that took longer than planned, in the last "
                "15 minutes. Each may have kept an online request waiting.",
                "percentunit",
                Query(f"pod:aqua_co_serving_overruns:ratio_rate15m{{{OF}}}", "{{pod}}"),
            )
        )
        .with_panel(
            lines(
                "Offline requests outside",
                "Requests that hold no memory: they wait for a gap, or gave theirs up.",
                "short",
                Query(f"sum by (pod) (aqua:offline_requests_waiting{{{OF}}})", "{{pod}}"),
            )
        )
        .with_panel(
            lines(
                "Offline preemptions",
                "How often offline requests gave their memory up to online ones.",
                "reqps",
                Query(
                    "sum by (pod) "
                    f"(rate(aqua:offline_preemptions_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Offline budget of a step",
                "Offline tokens that the last step was given; and the fixed budget that a step has "
                "without online requests while no step-time profile holds, 0 where one does.",
                "short",
                Query(f"max by (pod) (aqua:offline_granted_tokens{{{OF}}})", "{{pod}} given"),
                Query(f"max by (pod) (aqua:offline_budget_tokens{{{OF}}})", "{{pod}} fixed budget"),
            )
        )
        .with_panel(
            lines(
                "Limit of a step",
                "How long the last step was to take with its offline work, at most; 0 where it had "
                "none, or no limit.",
                "s",
                Query(f"max by (pod) (aqua:offline_limit_seconds{{{OF}}})", "{{pod}}"),
            )
        )
        .with_panel(
            lines(
                "Checkpoint lag",
                "Full blocks of offline requests in memory that have no copy yet. If an arrival "
                "takes that memory, they are paged out first, or computed anew. Copies are made as "
                "memory fills up, so a lag beside free memory is meant.",
                "short",
                Query(f"sum by (pod) (aqua:checkpoint_lag_blocks{{{OF}}})", "{{pod}}"),
            )
        )
        .with_panel(
            lines(
                "Without profile, without aborts",
                "1 where an engine goes by the fixed budget for want of a step-time profile that "
                "holds, and 1 where its steps cannot be aborted inside; and 1 where it overlaps "
                "steps but for offline ones, so that these can be aborted.",
                "short",
                Query(
                    f"max by (pod) (aqua:co_serving_without_profile{{{OF}}})",
                    "{{pod}} without profile",
                ),
                Query(
                    f"max by (pod) (aqua:co_serving_without_aborts{{{OF}}})",
                    "{{pod}} without aborts",
                ),
                Query(
                    f"max by (pod) (aqua:co_serving_steps_in_turn{{{OF}}})",
                    "{{pod}} offline steps in turn",
                ),
                highest=1,
            )
        )
    )


def _step_aborts(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Aborts of offline steps"))
        .with_panel(
            lines(
                "Arrivals and aborted steps",
                "Online requests that came in, and steps of offline work that they stopped between "
                "two layers. An arrival that meets no such step aborts none.",
                "reqps",
                Query(
                    f"sum by (pod) (rate(aqua:online_arrivals_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}} arrivals",
                ),
                Query(
                    f"sum by (pod) (rate(aqua:step_aborts_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}} aborted",
                ),
            )
        )
        .with_panel(
            lines(
                "From an arrival until its step had stopped",
                "Mean of the last 15 minutes: what an online request waits for offline work that "
                "runs. Empty where nothing was aborted.",
                "s",
                Query(f"pod:aqua_step_abort_seconds:mean_rate15m{{{OF}}}", "{{pod}}"),
            )
        )
        .with_panel(
            lines(
                "Tokens computed in vain",
                "Of aborted steps, at most, and computed again later: the price of short waits. "
                "Compare with the tokens of offline requests.",
                "short",
                Query(
                    f"sum by (pod) (rate(aqua:step_abort_tokens_total{{{OF}}}[$__rate_interval]))",
                    "{{pod}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Aborts of one arrival",
                "Steps that one online request aborted, at most, since the engine started: 1, or "
                "something is wrong.",
                "short",
                Query(f"max by (pod) (aqua:step_aborts_per_arrival{{{OF}}})", "{{pod}}"),
            )
        )
    )

"""Cluster overview: what is offered, lent and wanted, by whom, and whether the books are well."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from aqua_dashboards.panels import Query, bars, choice, dashboard, lines, number, rows

OF: Final = 'namespace=~"$namespace"'
ON: Final = f'{OF},node=~"$node",model=~"$model"'
PRODUCER: Final = "producer, node, gpu_uuid, model"
CONSUMER: Final = "consumer, node, gpu_uuid, model"
BORROWS: Final = f'{ON},consumer!=""'
"""The books' series; a consumer's own have the same name and no `consumer`."""


def overview() -> Dashboard:
    """The whole installation on one page."""
    board = (
        dashboard(
            "aqua-overview",
            "Aqua / Cluster overview",
            "Who lends what to whom, and whether the coordinators and their books are well.",
        )
        .with_variable(
            choice("namespace", "Installation", "label_values(aqua_coordinator_info, namespace)")
        )
        .with_variable(
            choice("node", "Node", f"label_values(aqua_producer_offered_bytes{{{OF}}}, node)")
        )
        .with_variable(
            choice("model", "Model", f"label_values(aqua_producer_offered_bytes{{{OF}}}, model)")
        )
    )
    return _coordinators(_members(_now(board)))


def _now(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Now"))
        .with_panel(
            number(
                "Coordinators",
                "Coordinators that answered the last scrape. One is enough to serve.",
                "short",
                f"count(aqua_coordinator_info{{{OF}}})",
            )
        )
        .with_panel(
            number(
                "Without Redis",
                "Coordinators that do not reach Redis: they grant nothing, and what the books hold "
                "is not shown. Lent memory stays and can be taken back.",
                "short",
                f"count(aqua_redis_up{{{OF}}}) - sum(aqua_redis_up{{{OF}}})",
                bad_above=1,
            )
        )
        .with_panel(
            number(
                "Offered",
                "Memory that producers have volunteered, lent or not.",
                "bytes",
                f"sum(max by (namespace) (aqua_offered_bytes{{{OF}}}))",
            )
        )
        .with_panel(
            number(
                "Lent",
                "Memory of producers that consumers hold.",
                "bytes",
                f"sum(max by (namespace) (aqua_leased_bytes{{{OF}}}))",
            )
        )
        .with_panel(
            number(
                "In host memory",
                "What consumers keep in host memory because no peer has room for it.",
                "bytes",
                f"sum(max by (namespace) (aqua_spilled_host_bytes{{{OF}}}))",
            )
        )
        .with_panel(
            number(
                "Open reclaims",
                "Reclaims under way, or not taken up by their producer yet.",
                "short",
                f"sum(max by (namespace) (aqua_reclaim_pending{{{OF}}}))",
            )
        )
        .with_panel(
            lines(
                "Memory in the books",
                "Offered by all producers, lent, wanted by all consumers beyond what they have, "
                "and in host memory for want of a peer. Lent below offered while something is in "
                "host memory: the free part is on other machines than the want.",
                "bytes",
                Query(f"sum(max by (namespace) (aqua_offered_bytes{{{OF}}}))", "offered"),
                Query(f"sum(max by (namespace) (aqua_leased_bytes{{{OF}}}))", "lent"),
                Query(f"sum(max by (namespace) (aqua_wanted_bytes{{{OF}}}))", "wanted"),
                Query(
                    f"sum(max by (namespace) (aqua_spilled_host_bytes{{{OF}}}))", "in host memory"
                ),
            )
        )
        .with_panel(
            lines(
                "Leases by state",
                "Booked leases: granted and not attached yet, active, being taken back.",
                "short",
                Query(
                    f"sum by (state) (max by (namespace, state) (aqua_leases{{{OF}}}))", "{{state}}"
                ),
            )
        )
    )


def _members(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Who lends what to whom"))
        .with_panel(
            rows(
                "Producers",
                "Each producer: what it offers, what of that is lent, and requests that wait in "
                "its engine. Empty when there are more than 256.",
                "bytes",
                {
                    "offered": f"max by ({PRODUCER}) (aqua_producer_offered_bytes{{{ON}}})",
                    "lent": f"max by ({PRODUCER}) (aqua_producer_leased_bytes{{{ON}}})",
                    "queue": f"max by ({PRODUCER}) (aqua_producer_queue_length{{{ON}}})",
                },
                counts="queue",
            )
        )
        .with_panel(
            rows(
                "Consumers",
                "Each consumer: what it has on lease, what more it would take, and what it keeps "
                "in host memory instead. Empty when there are more than 256.",
                "bytes",
                {
                    "on lease": f"max by ({CONSUMER}) (aqua_consumer_leased_bytes{{{BORROWS}}})",
                    "wanted": f"max by ({CONSUMER}) (aqua_consumer_wanted_bytes{{{BORROWS}}})",
                    "in host memory": f"max by ({CONSUMER})"
                    f" (aqua_consumer_spilled_host_bytes{{{BORROWS}}})",
                },
            )
        )
        .with_panel(
            bars(
                "Part of each GPU's memory that is lent",
                "Lent by the books over all memory of the GPU by DCGM.",
                "percentunit",
                Query(
                    'gpu:aqua_leased:ratio{node=~"$node",model=~"$model"}', "{{node}} {{gpu_uuid}}"
                ),
            )
        )
        .with_panel(
            lines(
                "Members",
                "Producers and consumers in the books. One that falls silent leaves after "
                "AQUA_SILENT_MEMBER_S.",
                "short",
                Query(
                    f"sum by (role) (max by (namespace, role) (aqua_members{{{OF}}}))", "{{role}}s"
                ),
            )
        )
    )


def _coordinators(board: Dashboard) -> Dashboard:
    requests = "aqua_coordinator_requests_total"
    took = "aqua_coordinator_request_duration_seconds_bucket"
    return (
        board.with_row(Row("Coordinators and books"))
        .with_panel(
            lines(
                "Requests by answer",
                "Requests a second by status code. 429 and 503 tell the client to come again; "
                "other 5xx are faults.",
                "reqps",
                Query(f"sum by (code) (rate({requests}{{{OF}}}[$__rate_interval]))", "{{code}}"),
            )
        )
        .with_panel(
            lines(
                "Time to answer, p99",
                "By route, from the end of a request's head to the end of its answer.",
                "s",
                Query(
                    f"histogram_quantile(0.99, sum by (route, le) (rate({took}{{{OF}}}"
                    "[$__rate_interval])))",
                    "{{route}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Time of Redis, p99",
                "By command or step. All coordinators wait for the same Redis: when it is slow, so "
                "is everything but copies and reclaims.",
                "s",
                Query(
                    "histogram_quantile(0.99, sum by (command, le) (rate("
                    f"aqua_redis_command_duration_seconds_bucket{{{OF}}}[$__rate_interval])))",
                    "{{command}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Refusals",
                "Grants that a quota refused, and requests of those that ask too often.",
                "reqps",
                Query(
                    f"sum by (quota) (rate(aqua_quota_refusals_total{{{OF}}}[$__rate_interval]))",
                    "quota of the {{quota}}",
                ),
                Query(
                    f"sum by (kind) (rate(aqua_coordinator_rate_refusals_total{{{OF}}}"
                    "[$__rate_interval]))",
                    "too many {{kind}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Silence of the quietest member",
                "Age of the oldest last report, by role. Members report every few seconds.",
                "s",
                Query(
                    "time() - max by (namespace, role) (aqua_oldest_heartbeat_timestamp_seconds"
                    f"{{{OF}}})",
                    "{{role}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Faults",
                "Background loops that fail, records of the books that were set aside, entries of "
                "the audit log that were not written. All are zero when all is well.",
                "short",
                Query(f"sum(aqua_coordinator_loops_failing{{{OF}}})", "loops failing"),
                Query(
                    f"sum(max by (namespace) (aqua_books_quarantined_total{{{OF}}}))",
                    "records set aside",
                ),
                Query(
                    f"sum(increase(aqua_coordinator_audit_failures_total{{{OF}}}[$__range]))",
                    "audit entries lost",
                ),
            )
        )
        .with_panel(
            lines(
                "Clock of the books stopped",
                "Part of the time in which nothing aged, by reason: no coordinator was there, "
                "reports were refused, or most members were silent at once.",
                "percentunit",
                Query(
                    "max by (reason) (rate(aqua_books_clock_stopped_seconds_total"
                    f"{{{OF}}}[$__rate_interval]))",
                    "{{reason}}",
                ),
            )
        )
        .with_panel(
            lines(
                "From grant to slabs",
                "How long consumers wait for memory that was granted; a tenth and a hundredth wait "
                "longer than these.",
                "s",
                *(
                    Query(
                        f"histogram_quantile({part}, sum by (le) (rate("
                        f"aqua_lease_attach_duration_seconds_bucket{{{OF}}}[$__rate_interval])))",
                        name,
                    )
                    for part, name in ((0.9, "p90"), (0.99, "p99"))
                ),
            )
        )
    )

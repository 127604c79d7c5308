"""Batch view: what tenants wait for, how fast it goes, and which engines answer.

Batches and open requests are of the database, which all services show alike; the rest is summed
over services.
"""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from aqua_dashboards.panels import Query, choice, dashboard, lines, number

OF: Final = 'namespace=~"$namespace"'
AT: Final = f'{OF},engine=~"$engine"'


def batches() -> Dashboard:
    """Progress, engines and failures of a batch service."""
    board = (
        dashboard(
            "aqua-batches",
            "Aqua / Batches",
            "What batches have left, how fast it goes, and which engines answer.",
        )
        .with_variable(
            choice("namespace", "Installation", "label_values(aqua_batch_open_requests, namespace)")
        )
        .with_variable(
            choice("engine", "Engine", f"label_values(aqua_batch_engine_limit{{{OF}}}, engine)")
        )
    )
    return _failures(_engines(_progress(_now(board))))


def _now(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Now"))
        .with_panel(
            number(
                "Services",
                "Batch services that answered the last scrape. Any one of them runs all batches.",
                "short",
                f"count(aqua_batch_open_requests{{{OF}}})",
            )
        )
        .with_panel(
            number(
                "Open requests",
                "Requests of running batches that have neither an answer nor an error yet.",
                "short",
                f"sum(max by (namespace) (aqua_batch_open_requests{{{OF}}}))",
            )
        )
        .with_panel(
            number(
                "Late batches",
                "Running batches that, at their pace so far, would take more than four fifths of "
                "their window. They go before others already.",
                "short",
                f"sum(max by (namespace) (aqua_batch_late_batches{{{OF}}}))",
                bad_above=1,
            )
        )
        .with_panel(
            number(
                "Engines absent",
                "Engines that no service reaches, or that have no room: what they have is tried at "
                "others.",
                "short",
                f"sum(min by (namespace, engine) (aqua_batch_engine_absent{{{AT}}}))",
                bad_above=1,
            )
        )
        .with_panel(
            number(
                "Loops failing",
                "Background loops of services that crash again and again, or hang.",
                "short",
                f"sum(aqua_batch_loops_failing{{{OF}}})",
                bad_above=1,
            )
        )
        .with_panel(
            number(
                "Time left",
                "Open requests over the answers of the last 15 minutes: how long it takes at this "
                "pace, if nothing comes.",
                "s",
                f"sum(max by (namespace) (aqua_batch_open_requests{{{OF}}}))"
                f" / sum(rate(aqua_batch_answers_total{{{OF}}}[15m]))",
            )
        )
    )


def _progress(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Progress"))
        .with_panel(
            lines(
                "Batches by status",
                "In the database, those that have ended and are kept included.",
                "short",
                Query(f"max by (status) (aqua_batch_batches{{{OF}}})", "{{status}}"),
            )
        )
        .with_panel(
            lines(
                "Requests left",
                "Falls as fast as answers come, and rises with each new batch.",
                "short",
                Query(f"max by (namespace) (aqua_batch_open_requests{{{OF}}})", "{{namespace}}"),
            )
        )
        .with_panel(
            lines(
                "Answers by status",
                "What engines answered, a second: 4xx is a body that the engine refuses, 0 a "
                "request of which every attempt failed.",
                "reqps",
                Query(
                    f"sum by (status) (rate(aqua_batch_answers_total{{{OF}}}[$__rate_interval]))",
                    "{{status}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Batches that are late",
                "Their pace so far misses four fifths of their window.",
                "short",
                Query(f"max by (namespace) (aqua_batch_late_batches{{{OF}}})", "{{namespace}}"),
            )
        )
    )


def _engines(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Engines"))
        .with_panel(
            lines(
                "Requests at engines",
                "Requests of batches under way, and how many each engine gets at once, by "
                "feedback: below its limit there is not enough to do, at a low limit it is busy.",
                "short",
                Query(
                    f"sum by (engine) (aqua_batch_running_requests{{{AT}}})",
                    "{{engine}} running",
                ),
                Query(f"sum by (engine) (aqua_batch_engine_limit{{{AT}}})", "{{engine}} limit"),
            )
        )
        .with_panel(
            lines(
                "Engine absent",
                "1 while no service reaches it, or it says that it has no room.",
                "short",
                Query(f"min by (engine) (aqua_batch_engine_absent{{{AT}}})", "{{engine}}"),
                highest=1,
            )
        )
    )


def _failures(board: Dashboard) -> Dashboard:
    return (
        board.with_row(Row("Failures"))
        .with_panel(
            lines(
                "Retries",
                "Requests a second that went back to wait because an engine failed at them.",
                "reqps",
                Query(
                    "sum by (namespace) "
                    f"(rate(aqua_batch_retries_total{{{OF}}}[$__rate_interval]))",
                    "{{namespace}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Late answers",
                "Answers a second that were discarded because another service had taken their "
                "request up: it had been silent for longer than its lease.",
                "reqps",
                Query(
                    "sum by (namespace) "
                    f"(rate(aqua_batch_late_answers_total{{{OF}}}[$__rate_interval]))",
                    "{{namespace}}",
                ),
            )
        )
    )

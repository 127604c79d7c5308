"""Panels and variables as all dashboards have them: a title, a description, a unit and queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from grafana_foundation_sdk.builders import bargauge, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    ThresholdsConfig,
)
from grafana_foundation_sdk.models.common import (
    DataSourceRef,
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
PANEL_HEIGHT: Final = 8
STAT_HEIGHT: Final = 4

BuilderT = TypeVar(
    "BuilderT", stat.Panel, timeseries.Panel, table.Panel, heatmap.Panel, bargauge.Panel
)


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel, and what its lines are called."""

    expression: str
    legend: str = ""


def dashboard(uid: str, title: str, description: str) -> Dashboard:
    """An empty dashboard with the variable that chooses the Prometheus."""
    return (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["aqua"])
        .readonly()
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .with_variable(
            DatasourceVariable("datasource")
            .label("Prometheus")
            .type("prometheus")
            .include_all(False)
        )
    )


def choice(name: str, label: str, query: str) -> QueryVariable:
    """A variable of which any number of values is chosen, all to begin with.

    All is any value or none: on one machine there may be no namespaces.
    """
    return (
        QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def engine_choices(board: Dashboard) -> Dashboard:
    """Variables that choose engines by namespace and pod."""
    known = "pod:aqua_gpu:info"
    return board.with_variable(
        choice("namespace", "Namespace", f"label_values({known}, namespace)")
    ).with_variable(
        choice("pod", "Engine", f'label_values({known}{{namespace=~"$namespace"}}, pod)')
    )


def number(
    title: str, description: str, unit: str, query: str, *, bad_above: float | None = None
) -> stat.Panel:
    """One number, small; red from `bad_above` on."""
    panel = _described(stat.Panel(), title, description, STAT_HEIGHT, 4).unit(unit)
    steps = [Threshold(color="green", value=None)]
    if bad_above is not None:
        steps.append(Threshold(color="red", value=bad_above))
    return (
        panel.thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target("A", Query(query)))
    )


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    span: int = 12,
    highest: float | None = None,
) -> timeseries.Panel:
    """Lines over time."""
    panel = _described(timeseries.Panel(), title, description, PANEL_HEIGHT, span).unit(unit).min(0)
    if highest is not None:
        panel = panel.max(highest)
    panel = (
        panel.fill_opacity(10)
        .legend(
            VizLegendOptions()
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "max"])
            .show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    for name, query in zip("ABCDEFGH", queries, strict=False):
        panel = panel.with_target(_target(name, query))
    return panel


def rows(
    title: str, description: str, unit: str, columns: Mapping[str, str], *, counts: str = ""
) -> table.Panel:
    """A table with a row for each set of labels and a column for each expression.

    All are of one unit but the column `counts`.
    """
    panel = _described(table.Panel(), title, description, PANEL_HEIGHT, 24).unit(unit)
    if counts:
        plain = DynamicConfigValue(id_val="unit", value="short")
        panel = panel.override_by_name(counts, [plain])
    renamed = {}
    for name, (column, expression) in zip("ABCDEFGH", columns.items(), strict=False):
        query = _target(name, Query(expression)).format(PromQueryFormat.TABLE).instant()
        panel = panel.with_target(query)
        renamed[f"Value #{name}"] = column
    return panel.with_transformation(
        DataTransformerConfig(id_val="merge", options={})
    ).with_transformation(
        DataTransformerConfig(
            id_val="organize",
            options={"excludeByName": {"Time": True}, "renameByName": renamed},
        )
    )


def buckets(title: str, description: str, unit: str, query: str) -> heatmap.Panel:
    """A histogram over time; the query keeps `le`."""
    return (
        _described(heatmap.Panel(), title, description, PANEL_HEIGHT, 24)
        .unit(unit)
        .with_target(_target("A", Query(query, "{{le}}")).format(PromQueryFormat.HEATMAP))
    )


def bars(title: str, description: str, unit: str, query: Query) -> bargauge.Panel:
    """A bar for each set of labels, of how it is now."""
    return (
        _described(bargauge.Panel(), title, description, PANEL_HEIGHT, 12)
        .unit(unit)
        .min(0)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target("A", query).instant())
    )


def _described(panel: BuilderT, title: str, description: str, height: int, span: int) -> BuilderT:
    return panel.title(title).description(description).datasource(SOURCE).height(height).span(span)


def _target(ref_id: str, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref_id).expr(query.expression).datasource(SOURCE)
    return target.legend_format(query.legend) if query.legend else target

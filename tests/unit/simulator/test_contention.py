"""Fair shares of links, where arithmetic gives them, and what copies cost kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aqua_protocol.errors import ConfigError
from aqua_simulator.timing.contention import (
    FAIR_SHARE,
    Flow,
    max_min_rates,
    read_interference,
)


def test_equal_flows_share_a_link_equally() -> None:
    # Copies of two consumers and the producer's collective.
    assert max_min_rates({"nvlink": 90.0}, [Flow(("nvlink",))] * 3) == [30.0, 30.0, 30.0]


def test_what_one_does_not_want_goes_to_the_others() -> None:
    flows = [Flow(("nvlink",), 10.0), Flow(("nvlink",)), Flow(("nvlink",), 0.0)]
    assert max_min_rates({"nvlink": 90.0}, flows) == [10.0, 80.0, 0.0]


def test_a_flow_over_two_links_gets_the_rate_of_the_narrower_one() -> None:
    flows = [Flow(("a", "b")), Flow(("a",)), Flow(("b",))]
    assert max_min_rates({"a": 10.0, "b": 20.0}, flows) == [5.0, 5.0, 15.0]


def test_a_weight_guarantees_its_share_of_a_producers_link() -> None:
    both = [Flow(("egress",), weight=3.0), Flow(("egress",), weight=1.0)]
    assert max_min_rates({"egress": 100.0}, both) == pytest.approx([75.0, 25.0])
    # However many others come, nobody falls below the weight's share, and little wishes are met.
    small = [Flow(("egress",), 10.0, weight=3.0), Flow(("egress",), weight=1.0)]
    assert max_min_rates({"egress": 100.0}, small) == pytest.approx([10.0, 90.0])


def test_in_any_network_each_flow_is_served_or_has_a_full_link_where_none_gets_more() -> None:
    generator = np.random.default_rng(5)
    for _ in range(200):
        capacity = {name: float(generator.uniform(1.0, 10.0)) for name in "abcd"}
        flows = [
            Flow(
                tuple(generator.choice(list("abcd"), generator.integers(1, 4), replace=False)),
                float(generator.choice([generator.uniform(0.1, 5.0), np.inf])),
                float(generator.uniform(0.5, 3.0)),
            )
            for _ in range(generator.integers(1, 9))
        ]
        rates = max_min_rates(capacity, flows)
        used = {
            link: sum(rate for flow, rate in zip(flows, rates, strict=True) if link in flow.links)
            for link in capacity
        }
        assert all(used[link] <= capacity[link] * (1 + 1e-9) for link in capacity)
        for flow, rate in zip(flows, rates, strict=True):
            if rate == pytest.approx(flow.wanted_bytes_per_s):
                continue
            level = rate / flow.weight
            assert any(
                used[link] == pytest.approx(capacity[link])
                and all(
                    other_rate / other.weight <= level * (1 + 1e-9)
                    for other, other_rate in zip(flows, rates, strict=True)
                    if link in other.links
                )
                for link in flow.links
            ), (flow, rate, capacity)


@pytest.mark.parametrize(
    "flow", [Flow(("c",)), Flow(()), Flow(("a",), weight=0.0), Flow(("a",), weight=float("nan"))]
)
def test_flows_that_cannot_be_are_refused(flow: Flow) -> None:
    with pytest.raises(ConfigError):
        max_min_rates({"a": 1.0}, [flow])


def test_without_a_measurement_a_step_has_the_bandwidth_that_copies_leave() -> None:
    assert FAIR_SHARE.slowdown(0.0) == 1.0
    assert FAIR_SHARE.slowdown(0.5) == pytest.approx(2.0)
    assert "not measured" in FAIR_SHARE.source


def test_a_measured_curve_is_read_and_one_that_cannot_be_refused(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("copy_share,slowdown\n0.1,1.02\n0.3,1.2\n")
    curve = read_interference(path)
    assert curve.slowdown(0.05) == pytest.approx(1.01)
    assert curve.slowdown(0.2) == pytest.approx(1.11)
    assert curve.slowdown(0.9) == 1.2
    for text in ("a,b\n1,2\n", "copy_share,slowdown\n0.3,1.2\n0.1,1.1\n", "copy_share,slowdown\n"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_interference(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_interference(tmp_path / "absent")

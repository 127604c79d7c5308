"""Who gets how much of shared links, and what it costs, where arithmetic gives it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aqua_simulator.fleet.links import contend
from aqua_simulator.timing.contention import FAIR_SHARE, Interference
from aqua_simulator.timing.iteration import BANDWIDTH_SHARE
from aqua_simulator.whatif.cluster import Cluster, DeploymentList, cluster_of
from aqua_simulator.whatif.fleet_day import serve_fleet
from aqua_simulator.whatif.links import LoanTerms, PortTerms, SharedLinks, shared_links
from aqua_simulator.whatif.members import Assumptions, ServingTerms
from aqua_simulator.whatif.online import OnlineResult
from aqua_simulator.whatif.recorded_day import ModelLoad
from aqua_simulator.whatif.step_times import StepCoefficients

LINK, HBM = 100e9, 2000e9
ONE_GPU = PortTerms("one", LINK, HBM)
COLLECTIVE_S = 1e-6
FOUR_GPUS = PortTerms("four", 4 * LINK, 4 * HBM, COLLECTIVE_S)


def two_consumers(
    weights: tuple[float, float] = (1.0, 1.0), curve: Interference | None = FAIR_SHARE
) -> SharedLinks:
    """Ports 0 and 1 borrow of port 2."""
    loans = [LoanTerms(index, 2, weight) for index, weight in enumerate(weights)]
    return shared_links([ONE_GPU, ONE_GPU, replace(ONE_GPU, name="lender")], loans, curve)


def rates(links: SharedLinks) -> list[float]:
    return [links.ports[index].copy_bytes_per_s for index in (0, 1)]


def copy(links: SharedLinks, *seconds: float) -> None:
    """Let consumers copy for so much of a second at the rates of the moment."""
    for index, busy_s in enumerate(seconds):
        links.note_copies(index, busy_s * links.ports[index].copy_bytes_per_s)
    contend(links.ports, links.loans, 1.0)


def test_a_consumer_alone_has_the_whole_link() -> None:
    links = two_consumers()
    copy(links, 1.0, 0.0)
    # The other one would now find it busy all the time.
    assert rates(links) == pytest.approx([LINK, LINK / 2])


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_consumers_that_copy_all_the_time_have_their_weights_shares(
    weights: tuple[float, float],
) -> None:
    links = two_consumers(weights)
    for _ in range(3):
        copy(links, 1.0, 1.0)
    assert rates(links) == pytest.approx([LINK * each / sum(weights) for each in weights])
    assert [each.share for each in links.loans] == pytest.approx(
        [each / sum(weights) for each in weights]
    )


def test_one_that_copies_half_of_the_time_costs_the_other_half_of_its_share() -> None:
    links = two_consumers()
    copy(links, 0.0, 0.5)
    # A byte takes one time for half of the seconds, and two for the others.
    assert rates(links)[0] == pytest.approx(LINK / 1.5)
    copy(links, 0.0, 0.0)
    assert rates(links) == pytest.approx([LINK, LINK])


def test_a_producers_kernels_lose_the_bandwidth_that_copies_take() -> None:
    links = two_consumers()
    copy(links, 0.25, 0.0)
    taken = 0.25 * LINK / (HBM * BANDWIDTH_SHARE)
    assert links.ports[2].slowdown == pytest.approx(1.0 / (1.0 - taken), rel=1e-3)
    assert links.ports[0].slowdown == 1.0
    use = links.use(1.0)["lender"]
    assert use.copying_share == pytest.approx(0.25)
    assert use.slowdown == pytest.approx(use.worst_slowdown)
    assert use.worst_slowdown == links.ports[2].slowdown


def test_a_measured_curve_takes_the_arithmetics_place() -> None:
    links = two_consumers(curve=Interference(((0.0, 1.0), (0.5, 1.0)), "measured"))
    copy(links, 1.0, 1.0)
    assert links.ports[2].slowdown == 1.0
    assert rates(links) == pytest.approx([LINK / 2, LINK / 2])


def test_copies_and_collectives_share_a_link() -> None:
    # A consumer of one GPU, a producer of four: the copy is bound by the consumer's link.
    links = shared_links([ONE_GPU, FOUR_GPUS], [LoanTerms(0, 1)], FAIR_SHARE)
    links.ports[1].pending_tokens = int(1.0 / COLLECTIVE_S)
    copy(links, 1.0)
    assert links.ports[0].copy_bytes_per_s == pytest.approx(LINK)
    # It leaves three quarters to the collectives.
    assert links.ports[1].shared_token_s == pytest.approx(COLLECTIVE_S / 3)
    # A consumer as wide as the producer is as fast as the collectives let it be.
    wide = shared_links(
        [replace(FOUR_GPUS, collective_s=0.0), FOUR_GPUS], [LoanTerms(0, 1)], FAIR_SHARE
    )
    wide.ports[1].pending_tokens = int(0.5 / COLLECTIVE_S)
    copy(wide, 0.0)
    assert wide.ports[0].copy_bytes_per_s == pytest.approx(4 * LINK / 1.5)


# --- A cluster ------------------------------------------------------------------------------

SPAN_S = 30.0
TIMES = StepCoefficients(0.012, 1e-4, 3.1e-7, 1e-9, 0.01, is_fitted=True)


def crowd(**listed: object) -> Cluster:
    """Three engines with hardly any memory beside one that has much and a GPU that lends."""
    common = {"model": "Llama-3.1-8B", "gpu": "A100-80GB", "server": "a"}
    found, findings = cluster_of(
        DeploymentList.model_validate(
            {
                "models": [
                    {"name": "chat", "kv_tokens": 60_000, **common},
                    {"name": "docs", "replicas": 3, "kv_tokens": 4_000, **common},
                ],
                "lenders": [{"name": "images", "gpu": "A100-80GB", "spare_gb": 2, "server": "a"}],
                **listed,
            }
        ),
        "test",
    )
    assert not findings
    return found


def served(cluster: Cluster, **assumed: float) -> OnlineResult:
    generator = np.random.default_rng(7)
    loads = {}
    for name, count, prompts in (("chat", 60, 300), ("docs", 150, 2500)):
        unknown = np.full(count, np.nan)
        arrival_s = np.sort(generator.random(count)) * SPAN_S
        lengths = [generator.integers(low, high, count) for low, high in ((50, prompts), (20, 200))]
        loads[name] = ModelLoad(arrival_s, lengths[0], lengths[1], unknown, unknown)
    return serve_fleet(
        cluster,
        dict.fromkeys(loads, TIMES),
        loads,
        SPAN_S,
        ServingTerms(
            is_harvesting=True, is_fair=True, short=("docs",), assumed=Assumptions(**assumed)
        ),
    )


def test_without_contention_every_copy_has_its_link() -> None:
    off = served(replace(crowd(), interference=None))
    assert not off.links
    assert served(crowd(), contention=0.0) == off


def test_contention_costs_producers_and_a_curve_says_how_much() -> None:
    steep = Interference(((0.0, 1.0), (0.1, 3.0)), "steep")
    flat = Interference(((0.0, 1.0), (1.0, 1.0)), "flat")
    runs = [served(replace(crowd(), interference=each)) for each in (flat, FAIR_SHARE, steep)]
    slowdowns = [each.links["chat"].slowdown for each in runs]
    assert slowdowns[0] == 1.0 < slowdowns[1] < slowdowns[2]
    latencies = [each.by_model["chat"]["tpot_mean_s"] for each in runs]
    assert latencies[0] < latencies[1] < latencies[2]
    assert runs[1].links["images"].copying_share > 0.0


def test_several_consumers_of_one_producer_share_what_it_lends() -> None:
    # Of three documents two find a lender of their own, the third one only where it may share.
    apart, sharing = served(crowd()), served(crowd(consumers_per_producer=2))
    assert sharing.lending.used_gb_s > apart.lending.used_gb_s
    assert sharing.links["chat"].copying_share > 0.0

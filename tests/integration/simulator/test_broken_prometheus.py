"""What answers in place of a Prometheus, and broken histograms: named, and nothing invented."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from aqua_protocol.errors import AquaError, ConfigError
from aqua_simulator.whatif.cluster import Cluster, read_cluster
from aqua_simulator.whatif.prometheus import PrometheusSource, read_prometheus
from harness.scripted_server import Answer, Request, ScriptedServer


class Stand:
    """Answers each question with `text`, or with `value` at all times, in buckets of `bounds`."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.value, self.bounds = "3", ["10", "100", "+Inf"]
        self.server = ScriptedServer(self._answer)

    def _answer(self, request: Request) -> Answer:
        asked = parse_qs(request.content.decode())
        start_s, end_s, step_s = (float(asked[key][0]) for key in ("start", "end", "step"))
        count = int((end_s - start_s) / step_s + 1e-6) + 1
        return Answer(body=self.told(asked["query"][0], start_s, step_s, count).encode())

    def told(self, query: str, start_s: float, step_s: float, count: int) -> str:
        """What Prometheus would say."""
        if self.text is not None:
            return self.text
        labels: list[dict[str, str]] = [{}]
        if "by (le)" in query:
            labels = [{"le": bound} for bound in self.bounds]
        times = [start_s + index * step_s for index in range(count)]
        rows = [{"metric": each, "values": [[at, self.value] for at in times]} for each in labels]
        return json.dumps({"status": "success", "data": {"result": rows}})


@pytest.fixture
def stand() -> Iterator[Stand]:
    stand = Stand()
    with stand.server:
        yield stand


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text("models: [{name: m, model: Llama-3.1-8B, gpu: A100-80GB}]\n")
    return read_cluster(path)[0]


def source(stand: Stand, token: str | None = None) -> PrometheusSource:
    return PrometheusSource(stand.server.url, 0.0, 3600.0, 300.0, token)


@pytest.mark.parametrize(
    "result",
    [
        *('"x"', "5", "null", "[5]", '[{"metric": {}}]', '[{"metric": {}, "value": [1, "2"]}]'),
        *('[{"values": []}]', '[{"metric": {}, "values": [["x", "1"]]}]'),
        '[{"metric": {}, "values": [[300, "abc"]]}]',
        "[" * 100_000,
    ],
)
def test_an_answer_of_another_shape_is_told(stand: Stand, cluster: Cluster, result: str) -> None:
    stand.text = f'{{"status": "success", "data": {{"result": {result}}}}}'
    with pytest.raises(ConfigError, match="does not answer as a Prometheus"):
        read_prometheus(source(stand), cluster)


@pytest.mark.parametrize("value", ["+Inf", "-5", "1e12", "1e308"])
def test_counts_that_cannot_be_are_left_out(stand: Stand, cluster: Cluster, value: str) -> None:
    stand.value = value
    with pytest.raises(ConfigError, match="in a window cannot be"):
        read_prometheus(source(stand), cluster)


def test_a_model_whose_samples_are_no_numbers_is_not_idle(stand: Stand, cluster: Cluster) -> None:
    stand.value = "NaN"
    with pytest.raises(ConfigError, match="no engine reports"):
        read_prometheus(source(stand), cluster)


@pytest.mark.parametrize("bounds", [["+Inf"], ["abc"], []])
def test_without_buckets_lengths_are_means_and_it_is_told(
    stand: Stand, cluster: Cluster, bounds: list[str]
) -> None:
    stand.bounds = bounds
    day = read_prometheus(source(stand), cluster)
    assert set(day.loads["m"].prompt_tokens) == {1}
    told = {each.message.split(":")[1] for each in day.findings if "as long as" in each.message}
    assert told == {"request_prompt_tokens_bucket", "request_generation_tokens_bucket"}


def test_an_address_or_token_that_none_can_be_is_refused(stand: Stand, cluster: Cluster) -> None:
    for asked in (
        PrometheusSource("http://[::1", 0.0, 3600.0, 300.0),
        source(stand, "tökén"),
        source(stand, "line\nend"),
    ):
        with pytest.raises(AquaError, match=r"no address|is not an address|bearer token") as told:
            read_prometheus(asked, cluster)
        assert told.value.remedy

"""Several simulated engines behind one router, on one clock."""

from __future__ import annotations

from aqua_simulator.serving.engine import Engine, EngineSettings, serve_routed
from aqua_simulator.serving.memory import PagedMemory
from aqua_simulator.serving.request import Arrival
from aqua_simulator.timing.iteration import IterationTime


def engine(name: str, blocks: int) -> Engine:
    steady = IterationTime("steady", lambda _tokens: 1.0, lambda _b: 0.0, lambda _c: 0.0)
    settings = EngineSettings(max_num_batched_tokens=200, steps_in_flight=1, kv_bytes_per_token=8)
    return Engine(name, settings, steady, PagedMemory(blocks, 16))


def test_the_router_prefers_the_engine_with_fewer_requests() -> None:
    one, other = engine("a", 100), engine("b", 100)
    arrivals = [Arrival("0", 0.0, 100, 50), Arrival("1", 1.0, 10, 1), Arrival("2", 2.5, 10, 1)]
    served = serve_routed([one, other], arrivals)
    assert [row.request_id for row in one.finished] == ["0"]
    assert len(other.finished) == 2
    assert [row.request_id for row in served] == ["1", "2", "0"]

"""The units run as they are under a real systemd, in the sandbox that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from harness.bounds import until
from harness.image import ARCH, mounted
from harness.systemd_machine import UNITS, SystemdMachine

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(ARCH), reason="a machine of this kind has its own images"),
]

SERVICES: Final = sorted(path.stem for path in UNITS.glob("*.service"))
PORTS: Final = {"aqua-batch": 7720, "aqua-coordinator": 7700, "aqua-placer": 7710}
SETTINGS: Final = """
printf 'AQUA_TOKENS_FILE=/etc/aqua/tokens.json\\n' >/etc/aqua/coordinator.env
printf 'AQUA_BATCH_ENGINES=http://127.0.0.1:8000\\n' >/etc/aqua/batch.env
printf 'AQUA_PLACER_TOKEN=%032d\\n' 0 >/etc/aqua/placer.env
ip link set lo up
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdMachine]:
    with SystemdMachine(tmp_path_factory.mktemp("systemd")) as machine:
        machine.run(SETTINGS)
        yield machine


def await_answer(machine: SystemdMachine, unit: str) -> None:
    """Until it says that it lives."""
    url = f"http://127.0.0.1:{PORTS[unit]}/healthz"
    until(
        lambda: machine.run(f"curl --silent --fail --output /dev/null {url} && echo yes || true"),
        lambda: machine.run(f"journalctl --no-pager --unit {unit}"),
    )


@pytest.mark.parametrize("unit", SERVICES)
def test_a_unit_starts_comes_back_when_it_is_killed_and_stops_cleanly(
    machine: SystemdMachine, built: Callable[[str], str], unit: str
) -> None:
    with mounted(built(unit.removeprefix("aqua-"))) as root:
        machine.install(root)
    if unit == "aqua-coordinator":
        token = "/opt/aqua/bin/aqua-coordinator token --file /etc/aqua/tokens.json --role operator"
        machine.run(f"runuser --user aqua -- {token}")
    # Its program is there and every directive is known: nothing is said.
    assert machine.run(f"systemd-analyze verify /etc/systemd/system/{unit}.service 2>&1") == ""
    machine.run(f"systemctl start {unit}")
    await_answer(machine, unit)
    state = machine.state(unit)
    status = Path("/proc") / state["MainPID"] / "status"
    seen = machine.run(f"grep -E '^(Uid|NoNewPrivs|Seccomp|CapBnd):' {status}")
    assert "NoNewPrivs:\t1" in seen
    assert "Seccomp:\t2" in seen
    assert "CapBnd:\t0000000000000000" in seen
    assert "Uid:\t0\t" not in seen

    machine.run(f"systemctl kill --kill-whom=main --signal=KILL {unit}")
    until(lambda: machine.state(unit)["NRestarts"] == "1", "it is started again")
    await_answer(machine, unit)
    machine.run(f"systemctl stop {unit}")
    state = machine.state(unit)
    assert (state["ActiveState"], state["Result"]) == ("inactive", "success")
    assert "store died" not in machine.run(f"journalctl --no-pager --unit {unit} --lines 5")


def test_engines_meet_in_a_folder_that_is_theirs_alone(machine: SystemdMachine) -> None:
    assert machine.run("stat --format '%U %a' /run/aqua").split() == ["aqua", "700"]

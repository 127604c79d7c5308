"""The one call to Kubernetes: labels and annotations of the object whose engine was measured.

A merge patch of the metadata of the object itself. Its pod template stays, so nothing restarts, and
the right that it takes is to patch that one object. What an earlier profile said and this one does
not is taken out; what others have written stays.

In a pod address, authority and token are where the kubelet puts them; elsewhere `kubectl proxy`
gives an address that needs neither. Not retried here: a Job is tried again as a whole.
"""

from __future__ import annotations

import os
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self

import httpx

from aqua_profiler.report.text import ANNOTATIONS, kubernetes
from aqua_protocol import AquaError, ConfigError, UnavailableError
from aqua_protocol.errors import ForbiddenError, UnauthenticatedError, UnknownResourceError
from aqua_protocol.profile import ModelProfile

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Fixed by Kubernetes: where a pod finds token, authority and namespace."""

TIMEOUT_S: Final = 30.0
"""Seconds until a silent API server counts as gone. Doubled, a Job is tried again later."""

PATHS: Final = {
    "deployment": "apis/apps/v1/namespaces/{namespace}/deployments/{name}",
    "statefulset": "apis/apps/v1/namespaces/{namespace}/statefulsets/{name}",
}
"""Kinds that can be labelled, and where they are."""


class KubernetesApi:
    """An API server and who we are to it.

    Args:
        url: Its address.
        namespace: Of the object.
        token: Of the service account; None behind a proxy that has one.
        authority: File with the authorities of its certificate; None: the system's.
    """

    def __init__(
        self, url: str, namespace: str, token: str | None = None, authority: Path | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.namespace = namespace
        self._token = token
        self._authority = authority

    @classmethod
    def from_pod(cls, directory: Path = SERVICE_ACCOUNT) -> Self:
        """That of the cluster in which this process runs.

        Raises:
            ConfigError: It runs in none, or without a token.
        """
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            token = (directory / "token").read_text(encoding="utf-8").strip()
            namespace = (directory / "namespace").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"no service account of Kubernetes: {error}",
                remedy="Outside of a pod run `kubectl proxy` and give --api-url "
                "http://127.0.0.1:8001 and --namespace.",
            ) from error
        if not host:
            raise ConfigError(
                "KUBERNETES_SERVICE_HOST is not set: this is no pod", remedy="Give --api-url."
            )
        address = f"[{host}]" if ":" in host else host
        return cls(f"https://{address}:{port}", namespace, token, directory / "ca.crt")

    def label(self, profile: ModelProfile, target: str) -> dict[str, dict[str, str | None]]:
        """Write what the profile says into the metadata of `target`, such as `deployment/llama`.

        Returns:
            The metadata that was written; None: taken out.

        Raises:
            ConfigError: Not a kind and a name.
            UnknownResourceError: There is no such object.
            ForbiddenError: This service account may not patch it.
            UnavailableError: The API server does not answer, or not now.
        """
        kind, _, name = target.partition("/")
        if kind not in PATHS or not name or "/" in name:
            raise ConfigError(
                f"{target!r} is nothing to label",
                remedy=f"Write KIND/NAME, with a KIND of {', '.join(PATHS)}.",
            )
        wanted = kubernetes(profile)
        annotations = dict.fromkeys(ANNOTATIONS) | wanted["annotations"]
        metadata: dict[str, dict[str, str | None]] = {
            "labels": {**wanted["labels"]},
            "annotations": annotations,
        }
        path = PATHS[kind].format(namespace=self.namespace, name=name)
        self._patch(path, {"metadata": metadata}, target)
        return metadata

    def _patch(self, path: str, body: object, target: str) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            with httpx.Client(
                timeout=TIMEOUT_S,
                trust_env=False,
                verify=True if self._authority is None else str(self._authority),
            ) as client:
                answer = client.patch(
                    f"{self.url}/{path}",
                    params={"fieldManager": "aqua-profiler"},
                    headers=headers,
                    json=body,
                )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise UnavailableError(
                f"no answer from {self.url}: {error}", remedy="Check the address of the API server."
            ) from error
        if not answer.is_success:
            raise self._error(answer, target)

    def _error(self, answer: httpx.Response, target: str) -> AquaError:
        said = f"{target} in {self.namespace}: {_message(answer)}"
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return UnknownResourceError(said, remedy="Name one that is there, and its namespace.")
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            return UnauthenticatedError(said, remedy="Give the pod a token of its service account.")
        if answer.status_code == HTTPStatus.FORBIDDEN:
            kind, _, name = target.partition("/")
            remedy = f"Grant `patch` on {kind}s of apps, resourceNames [{name}], to the account."
            return ForbiddenError(said, remedy=remedy)
        if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS or answer.is_server_error:
            return UnavailableError(said, remedy="Try again.")
        return ConfigError(said, remedy="Look at what the API server says.")


def _message(answer: httpx.Response) -> str:
    """What the API server says: a `Status` has a message."""
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.reason_phrase}"

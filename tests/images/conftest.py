"""Images of this tree, built once for all tests of the tier."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from harness.image import build, buildah, make_base, name_of


@pytest.fixture(scope="session", autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory) -> None:
    make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def built(base: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The image of a service; that of the last run with `KEEP=1`."""
    known = (
        buildah("images", "--format", "{{.Name}}").splitlines() if os.environ.get("KEEP") else []
    )
    made: dict[str, str] = {}

    def image(service: str) -> str:
        name = name_of(service)
        if service not in made:
            made[service] = (
                name if name in known else build(service, tmp_path_factory.mktemp(service))
            )
        return made[service]

    return image

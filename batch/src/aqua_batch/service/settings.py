"""Settings of the batch service: from `AQUA_BATCH_*` variables, overridden by options.

Everything is bounded and checked before anything starts; a value that does not fit is a
`ConfigError` that names the variable, not its content.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from aqua_batch.policies import Policy
from aqua_batch.tokens import BYTES
from aqua_protocol.settings import read_settings

DEFAULT_PORT: Final = 7720
"""Unassigned at IANA, and of no other service of Aqua's. Fixed: clients expect it."""
SHORTEST_TOKEN: Final = 32
"""Characters, 128 bits in hexadecimal; doubled, no attack gets harder."""
ENGINE_URL: Final = r"(dns\+)?https?://[^\s,@]{1,2000}"
"""Fixed: no user names or passwords, which would be in logs."""
MOST_ENGINES: Final = 1000
"""Engines by name; a larger fleet stands behind a router. Doubled, choosing an engine takes twice
as long, some 0.1 ms."""


def default_batch_dir() -> Path:
    """`$XDG_STATE_HOME/aqua/batch`, by default `~/.local/state/aqua/batch`: state, not cache."""
    state_home = os.environ.get("XDG_STATE_HOME")
    return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "aqua" / "batch"


def _by_commas(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _engines(urls: tuple[str, ...]) -> tuple[str, ...]:
    if not urls:
        raise ValueError("name an engine, as in --engine http://127.0.0.1:8000")
    if wrong := [url for url in urls if re.fullmatch(ENGINE_URL, url) is None]:
        raise ValueError(
            f"number {urls.index(wrong[0]) + 1} is no URL such as http://node-1:8000 or "
            "dns+http://llm.gpu.svc:8000"
        )
    return urls


HostName = Annotated[str, Field(pattern=r"^[0-9A-Za-z._-]{1,253}$")]


class BatchSettings(BaseSettings):
    """What a batch service needs to know before it starts."""

    model_config = SettingsConfigDict(
        env_prefix="AQUA_BATCH_",
        extra="ignore",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,
    )

    engines: Annotated[
        tuple[str, ...], NoDecode, BeforeValidator(_by_commas), AfterValidator(_engines)
    ] = Field(
        (),
        max_length=MOST_ENGINES,
        validate_default=True,
        description="Base URLs of the engines, servers that speak OpenAI's HTTP: "
        "http://node-1:8000,http://node-2:8000. Each gets requests of the models that it lists. "
        "dns+http://llm.gpu.svc:8000 is every address of that name, looked up again and again.",
    )
    engine_api_key: SecretStr | None = Field(
        None, description="API key for the engines, if they want one."
    )
    engine_concurrency: int = Field(
        64,
        ge=1,
        le=4096,
        description="Most requests of batches that one engine gets at once; how many of them it "
        "does get is found by feedback.",
    )
    engine_ttft_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="Mean time to the first token above which an engine that tells it (vLLM) gets "
        "fewer. Unset: its queue and memory alone decide.",
    )
    engine_deadlines: bool = Field(
        default=False,
        description="Tell engines by when each request's batch expires (x-aqua-finish-in). One "
        "that co-serves takes the nearest first, and lets what would be late lengthen the steps of "
        "online answers up to its tpot_s.",
    )
    order: Policy = Field(
        Policy.FORESIGHT,
        description="In what order requests of a batch run: BlendServe's (foresight, paper), or "
        "fcfs for that of the file.",
    )
    tokenizer: str = Field(
        BYTES,
        min_length=1,
        max_length=4096,
        description="Hugging Face folder or tiktoken name, for that order; bytes find the same "
        "prefixes, and count tokens by four bytes each.",
    )
    gpu: str = Field("A100-80GB", max_length=64, description="GPU of an engine, for that order.")
    model: Path | None = Field(
        None,
        description="Folder or config.json of the model, for that order; Llama-3.1-8B otherwise.",
    )
    request_timeout_s: float = Field(
        3600.0, gt=0, le=86_400, description="How long an engine may take to answer one request."
    )
    max_attempts: int = Field(
        5, ge=1, le=100, description="How often engines may fail at a request before it ends so."
    )
    lease_s: float = Field(
        20.0,
        ge=0.2,
        le=3600,
        description="How long after its last sign of life a service counts as dead; others then "
        "take up its requests.",
    )
    listen_host: str = Field(
        "127.0.0.1",
        min_length=1,
        max_length=253,
        description="Address to listen on. Anything but loopback needs an API key: "
        "`aqua batch key add`.",
    )
    listen_port: int = Field(
        DEFAULT_PORT, ge=0, le=65_535, description="Port to listen on; 0 takes a free one."
    )
    allowed_hosts: Annotated[frozenset[HostName], NoDecode, BeforeValidator(_by_commas)] = Field(
        frozenset(),
        description="Further names that requests may call it by while there is no API key.",
    )
    operator_token: SecretStr | None = Field(
        None,
        min_length=SHORTEST_TOKEN,
        description="Token that shows how the batches of all tenants are going (/aqua/batches), as "
        "a coordinator's console asks for them. Unset: a tenant sees its own.",
    )
    data_dir: Path = Field(
        default_factory=default_batch_dir,
        description="Directory of database and files, where these have no URL of their own.",
    )
    database_url: SecretStr | None = Field(
        None,
        description="postgresql+psycopg://user:password@host/name, or sqlite:////path. "
        "Unset: SQLite in data_dir.",
    )
    files_url: str | None = Field(
        None,
        max_length=2048,
        description="Where the bytes of files lie, any URL of fsspec's. Unset: a folder in "
        "data_dir.",
    )
    max_file_bytes: int = Field(
        200_000_000, ge=1, le=1 << 40, description="Bytes that an uploaded file may have."
    )
    max_batch_requests: int = Field(
        50_000, ge=1, le=10_000_000, description="Requests that a batch may have."
    )
    file_ttl_s: int = Field(
        2_592_000,
        ge=60,
        le=10 * 365 * 86_400,
        description="How long files are kept that do not say it themselves, inputs and outputs.",
    )
    log_level: Annotated[str, Field(pattern=r"^(debug|info|warning|error)$")] = Field(
        "info", description="debug, info, warning or error."
    )

    @property
    def database(self) -> str:
        """URL of the database."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.data_dir.absolute()}/batch.db"

    @property
    def files(self) -> str:
        """URL of the store of files."""
        return self.files_url or f"file://{self.data_dir.absolute()}/files"


def load_batch_settings(**overrides: Any) -> BatchSettings:  # noqa: ANN401 - whatever a field takes
    """Read the environment; keyword arguments that are not None take precedence.

    Raises:
        ConfigError: A value does not fit; the message names its variable, not its content.
    """
    remedy = "docs/operations/configuration.md lists every setting."
    return read_settings(BatchSettings, "AQUA_BATCH_", remedy, overrides)

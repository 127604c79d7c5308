"""Settings: from `AQUA_*` environment variables, overridden by command line options.

Everything is bounded and checked before anything starts; a value that does not fit is a
`ConfigError` that names the variable. Nothing is read leniently: an unknown option of the command
line is an error, while unknown variables are left alone, because aqualib shares the prefix.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from aqua_cli.service import is_loopback
from aqua_client.tls import TlsFiles
from aqua_coordinator.embedded import Fsync
from aqua_coordinator.store.scripts import MAX_GAP_S
from aqua_protocol import ConfigError
from aqua_protocol.settings import read_settings

MIN_SECRET_LENGTH = 32
"""Characters of a configured secret, 128 bits in hexadecimal; doubled, no attack gets harder."""
DEFAULT_PORT = 7700
"""Unassigned at IANA, and of no other service of Aqua's. Fixed: members expect it."""


def default_data_dir() -> Path:
    """`$XDG_STATE_HOME/aqua`, by default `~/.local/state/aqua`: state, not cache."""
    state_home = os.environ.get("XDG_STATE_HOME")
    return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "aqua"


class CoordinatorSettings(BaseSettings):
    """What a coordinator needs to know before it starts."""

    model_config = SettingsConfigDict(
        env_prefix="AQUA_",
        extra="ignore",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,
    )

    listen_host: str = Field(
        "127.0.0.1",
        min_length=1,
        max_length=253,
        description="Address to listen on. Anything but loopback needs a tokens file.",
    )
    listen_port: int = Field(
        DEFAULT_PORT, ge=0, le=65_535, description="Port to listen on; 0 takes a free one."
    )
    allowed_hosts: Annotated[
        frozenset[Annotated[str, Field(pattern=r"^[0-9A-Za-z._-]{1,253}$")]],
        NoDecode,
        BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
    ] = Field(
        frozenset(),
        description="Further names that requests may call it by, beside loopback and the address: "
        "aqua.internal,localhost.",
    )
    redis_url: SecretStr | None = Field(
        None,
        description=(
            "Redis or Valkey that keeps the books: redis://, rediss://, unix:// or "
            "redis+sentinel://host:port,host:port/service/db. Unset: an embedded Valkey."
        ),
    )
    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="Directory of the embedded Valkey: its data, socket and log.",
    )
    fsync: Fsync | None = Field(
        None,
        description="When writes are forced to the disk by the embedded Valkey, or at the least by "
        "another Redis: always, everysec, no. Unset: everysec, in production always.",
    )
    min_replicas: int | None = Field(
        None, ge=0, le=16, description="Replicas that have a write before it is acknowledged."
    )
    production: bool = Field(
        default=False,
        description="Refuse to start without tokens, or on a Redis that may lose what it answered.",
    )
    store_binary: Path | None = Field(
        None, description="Server program to embed instead of the bundled Valkey."
    )
    store_timeout_s: float = Field(
        5.0, ge=0.1, le=60, description="How long Redis may take to answer."
    )
    tokens_file: Path | None = Field(
        None,
        description="Bearer tokens, made by `aqua-coordinator token`. Unset: no authentication.",
    )
    quotas_file: Path | None = Field(
        None,
        description="What tenants and consumers may have on lease, and how often they may ask. "
        "Followed; the same for all coordinators of one Redis.",
    )
    max_grants_per_s: float = Field(
        1000.0, gt=0, le=1e6, description="Grants a second that one token may ask for here."
    )
    max_reports_per_s: float = Field(
        2000.0,
        gt=0,
        le=1e6,
        description="Reports a second of one token here: each member's, and each reclaim in them.",
    )
    tls_cert: Path | None = Field(
        None, description="Certificate of this coordinator, with its chain; https from then on."
    )
    tls_key: Path | None = Field(
        None, description="Its key, without a password, if it is not in the same file."
    )
    tls_client_ca: Path | None = Field(
        None,
        description="Authorities whose certificates clients have to show, but to /healthz and "
        "/readyz. TLS files may be replaced at any time.",
    )
    metrics_need_token: bool | None = Field(
        None,
        description="Whether /metrics wants a token. Unset: unless the address is loopback.",
    )
    capability_secret: SecretStr | None = Field(
        None,
        description=(
            "Signs lease tokens; the same for all coordinators of one Redis. "
            "Unset: made with the books and kept in Redis."
        ),
    )
    capability_secret_other: SecretStr | None = Field(
        None,
        description="While the secret is being replaced: the one to come, then the one before. "
        "Producers take lease tokens of both.",
    )
    adoption_key: SecretStr | None = Field(
        None,
        description="Proves leases to books that were lost; the same for all coordinators of one "
        "Redis, and not in it. Unset: made in data_dir, for this coordinator's leases only.",
    )
    adoption_key_other: SecretStr | None = Field(
        None,
        description="While the adoption key is being replaced: the one to come, then the one "
        "before. Proofs of both are good.",
    )
    heartbeat_s: float = Field(
        1.0, ge=0.05, le=60, description="How often members report; many members less often."
    )
    silent_member_s: float = Field(
        10.0,
        ge=MAX_GAP_S + 1,
        le=3600,
        description="A member that has not reported for this long leaves the books.",
    )
    max_clock_stop_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description=(
            "How long leases and members do not age while their reports are refused for want of "
            "room, or most members are silent at once; 0: never."
        ),
    )
    attach_window_s: float = Field(
        10.0, ge=0.2, le=300, description="Time to attach to a granted lease before it expires."
    )
    max_concurrent_requests: int = Field(
        2048,
        ge=1,
        le=65_536,
        description="Requests served at once, a quarter kept for reports; more are told to retry.",
    )
    max_requests_per_token: int = Field(
        512,
        ge=1,
        le=65_536,
        description="Requests under way at once of one token; its reports are counted apart.",
    )
    max_requests_per_peer: int = Field(
        1024,
        ge=1,
        le=65_536,
        description="Requests under way at once from one address; reports are not counted.",
    )
    max_connections_per_token: int = Field(
        1024,
        ge=1,
        le=1_048_576,
        description="Open connections of one token; of those that report as many again, or, of "
        "all tokens that are not bound to a member, three quarters of what the process may have "
        "open.",
    )
    max_connections_per_peer: int = Field(
        4096,
        ge=1,
        le=1_048_576,
        description="Open connections from one address; those that report are not counted.",
    )
    transfer_timeout_s: float = Field(
        10.0,
        ge=0.1,
        le=300,
        description="Time for a head, a body or an answer to get through, or it is cut off.",
    )
    drain_s: float = Field(
        0.0,
        ge=0,
        le=300,
        description="How long it serves on, not ready, after SIGTERM: until probes have noticed.",
    )
    max_event_streams: int = Field(
        128,
        ge=1,
        le=4096,
        description="Event streams served at once, to one token a quarter; more are told to retry.",
    )
    batch_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s@]+$",
        max_length=2048,
        description="Batch service whose batches the console shows, to readers without a tenant.",
    )
    batch_operator_token: SecretStr | None = Field(
        None,
        min_length=MIN_SECRET_LENGTH,
        description="Token to ask it with, the same as there; not needed where it has no API keys.",
    )
    audit_log: str | None = Field(
        None,
        max_length=4096,
        description="File of the audit log, or stderr: a JSON line for each request that may "
        "change something. Unset: none.",
    )
    tracing: bool = Field(
        default=False,
        description="Go on with the traces of callers by OpenTelemetry, as the OTEL_* variables "
        "say; needs the extra `otel`.",
    )
    log_level: Annotated[str, Field(pattern=r"^(debug|info|warning|error)$")] = Field(
        "info", description="debug, info, warning or error."
    )

    @property
    def required_fsync(self) -> Fsync:
        """The setting, or what is safe enough."""
        return self.fsync or (Fsync.ALWAYS if self.production else Fsync.EVERYSEC)

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        if self.min_replicas and self.redis_url is None:
            message = "min_replicas needs a redis_url: an embedded Valkey has none"
            raise ValueError(message)
        if self.silent_member_s < 3 * self.heartbeat_s:
            message = "silent_member_s must be at least three heartbeats"
            raise ValueError(message)
        if self.tls_cert is None and (self.tls_key or self.tls_client_ca):
            message = "tls_key and tls_client_ca need tls_cert"
            raise ValueError(message)
        for name in ("capability_secret", "adoption_key"):
            for secret in (getattr(self, name), getattr(self, f"{name}_other")):
                if secret is not None and len(secret.get_secret_value()) < MIN_SECRET_LENGTH:
                    message = f"{name} must have at least {MIN_SECRET_LENGTH} characters"
                    raise ValueError(message)
        return self

    def tls_files(self) -> TlsFiles | None:
        """What to serve https with; None for http."""
        if self.tls_cert is None:
            return None
        return TlsFiles(self.tls_client_ca, self.tls_cert, self.tls_key, server=True)

    @property
    def metrics_are_open(self) -> bool:
        """Whether /metrics, which names members and models, is for everybody who gets here."""
        open_by_default = is_loopback(self.listen_host)
        return open_by_default if self.metrics_need_token is None else not self.metrics_need_token

    def require_safe_address(self) -> None:
        """Refuse to be reachable from elsewhere, or in production, without authentication.

        Raises:
            ConfigError: No tokens file, in production or where `listen_host` is not loopback.
        """
        if self.tokens_file is None and (self.production or not is_loopback(self.listen_host)):
            raise ConfigError(
                f"refusing to listen on {self.listen_host} without authentication",
                remedy=(
                    "Make a token with `aqua-coordinator token --file tokens.json --role operator` "
                    "and set AQUA_TOKENS_FILE, or listen on 127.0.0.1."
                ),
            )


def load_settings(**overrides: Any) -> CoordinatorSettings:  # noqa: ANN401 - whatever a field takes
    """Read the environment; keyword arguments that are not None take precedence.

    Raises:
        ConfigError: A value does not fit; the message names its variable, not its content.
    """
    remedy = "docs/operations/configuration.md lists every setting."
    return read_settings(CoordinatorSettings, "AQUA_", remedy, overrides)

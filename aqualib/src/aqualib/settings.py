"""Settings of a member, from `AQUA_*` environment variables.

Everything has a default that works on one machine, a bound, and a sentence. A wrong value is a
`ConfigError` that names the variable; nothing is parsed leniently and nothing is started before all
of it is right. Code that embeds Aqua may override any field by name.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from aqua_client import CoordinatorClient
from aqua_client.tls import TlsFiles
from aqua_client.tracing import Tracer, open_tracer
from aqua_protocol import DEFAULT_SLAB_BYTES, ConfigError, TransportKind, parse_bytes
from aqua_protocol.ids import MAX_NAME_LENGTH, NAME_PATTERN, Name
from aqua_protocol.settings import read_settings
from aqua_protocol.units import MAX_BYTES, MIN_SLAB_BYTES
from aqualib.peers import require_safe_directory, trusted_uids
from aqualib.producer.copy_limit import HARM_SHARE
from aqualib.producer.escalation import Escalation

PREFIX: Final = "AQUA_"

DEFAULT_DEADLINE_S: Final = 5.0
"""Seconds that consumers get to give memory back: a hundred times what a drain of 1 GiB takes.
Doubled, a hung one is noticed 5 s later."""

DEFAULT_GRACE_S: Final = 5.0
"""Seconds between a passed deadline and a kill, under `Escalation.KILL`: for a consumer that was
stopped or swapped out. Doubled, its memory comes back 5 s later."""

DEFAULT_PROFILE_MAX_AGE_S: Final = 180 * 86_400.0
"""Half a year in seconds, by judgement: engines and prompts have changed by then. Doubled, rates of
a year ago are believed."""


def _bytes_from(value: object) -> object:
    """Accept `64MiB` as well as a plain count."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(error.message) from error


Size = Annotated[int, BeforeValidator(_bytes_from)]
Uid = Annotated[int, Field(ge=0, lt=1 << 32)]
# `1000,1001`, and `1000`, which arrives as a number, as well as a collection of numbers.
Uids = Annotated[
    frozenset[Uid],
    NoDecode,
    BeforeValidator(lambda v: str(v).split(",") if isinstance(v, str | int) else v),
]


class Settings(BaseSettings):
    """What a member needs to know; immutable. Read it with `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    coordinator_url: str = Field(
        default="http://127.0.0.1:7700",
        max_length=2048,
        description="Where the coordinator is; several, by commas, if they share one Redis.",
    )
    token: SecretStr | None = Field(None, description="Bearer token for the coordinator.")
    admin_token: SecretStr | None = Field(
        None,
        min_length=16,
        description="Bearer token for an engine's admin API; unset: it refuses every call.",
    )
    tls_ca: Path | None = Field(
        None, description="Authorities to trust for an https coordinator; the system's if unset."
    )
    tls_client_cert: Path | None = Field(
        None, description="Certificate to show to a coordinator that wants one."
    )
    tls_client_key: Path | None = Field(
        None, description="Its key, without a password, if it is not in the same file."
    )
    request_timeout_s: float = Field(
        default=2.0, gt=0, le=60, description="Bound of one call to the coordinator."
    )
    heartbeat_s: float = Field(
        default=60.0,
        ge=0.05,
        le=60,
        description="Longest silence towards the coordinator, which asks for shorter ones.",
    )
    lease_ttl_s: float = Field(
        default=30.0, ge=1, le=3600, description="Life of a lease without renewal."
    )
    profile_max_age_s: float = Field(
        default=DEFAULT_PROFILE_MAX_AGE_S,
        ge=1,
        le=1e9,
        description="Age of a model's profile from which a producer does not go by it any more.",
    )

    tracing: bool = Field(
        default=False,
        description="Draw traces of leases by OpenTelemetry, as the OTEL_* variables say; needs "
        "the extra `otel`.",
    )

    member: Name | None = Field(
        None, description="Name in the books, as plans say it; made of node and process if unset."
    )
    node: Name | None = Field(None, description="Name of this host; found out if unset.")
    domain: Name | None = Field(None, description="Scale-up domain of the GPU; found out if unset.")
    gpu_uuid: Name | None = Field(None, description="The GPU; found out if unset.")

    transport: TransportKind | None = Field(
        None, description="How slabs are shared; the best that works if unset."
    )
    slab_bytes: Size = Field(
        default=DEFAULT_SLAB_BYTES,
        ge=MIN_SLAB_BYTES,
        le=1 << 40,
        description="Unit of offers and reclaims.",
    )
    emulated_hbm_bytes: Size | None = Field(
        None,
        ge=MIN_SLAB_BYTES,
        le=MAX_BYTES,
        description="Device memory to pretend on a machine without a GPU.",
    )
    vllm_contract: Path | None = Field(
        None,
        description="Contract of a vLLM that Aqua does not know, to start on it all the same.",
    )
    checksum: bool = Field(
        default=False, description="Check every restored block against its checksum."
    )
    write_behind: bool | None = Field(
        None,
        description="Copy what is written on peers to host memory ahead of a reclaim, which then "
        "only unmaps; on GPUs if unset.",
    )
    host_bytes: Size | None = Field(
        None, ge=0, le=MAX_BYTES, description="Host memory for spilled data."
    )
    wanted_bytes: Size | None = Field(
        None, ge=0, le=MAX_BYTES, description="Peer memory a consumer asks for."
    )

    socket_dir: Path | None = Field(
        None,
        description="Directory of lease channel sockets; /run/aqua, the user's runtime directory "
        "or the temporary directory if unset.",
    )
    allowed_uids: Uids | None = Field(
        None, description="Users to lend to and borrow from beside our own and root; 1000,1001."
    )
    reclaim_deadline_s: float = Field(
        DEFAULT_DEADLINE_S, ge=0.001, le=600, description="Time for consumers to give memory back."
    )
    reclaim_grace_s: float = Field(
        DEFAULT_GRACE_S, ge=0, le=600, description="Time between a passed deadline and a kill."
    )
    harm_share: float = Field(
        default=HARM_SHARE,
        gt=0,
        le=1,
        description="Share of a producer's time that consumers' copies in the background may cost.",
    )
    escalation: Escalation = Field(
        default=Escalation.WAIT, description="What to do about consumers that overrun a deadline."
    )

    def tracer(self) -> Tracer | None:
        """The tracer of this process; None where tracing is off.

        Raises:
            ConfigError: OpenTelemetry is not installed, or its variables ask for what is not there.
        """
        return open_tracer("aqualib") if self.tracing else None

    def coordinator_client(self) -> CoordinatorClient:
        """A client of the coordinator that these settings describe; the caller closes it.

        Raises:
            ConfigError: The address or a TLS file is no good, or tracing cannot be had.
        """
        return CoordinatorClient(
            self.coordinator_url,
            None if self.token is None else self.token.get_secret_value(),
            tls=TlsFiles(self.tls_ca, self.tls_client_cert, self.tls_client_key),
            timeout_s=self.request_timeout_s,
            tracer=self.tracer(),
        )


def load_settings(**overrides: Any) -> Settings:  # noqa: ANN401 - checked field by field
    """Read the environment; `overrides` win over it, by field name, and None counts as unset.

    Raises:
        ConfigError: Names every variable that is wrong and what is wrong with it.
    """
    remedy = "Correct the variables, or unset them for the defaults."
    return read_settings(Settings, PREFIX, remedy, overrides)


def require_name(what: str, name: str) -> str:
    """`name`, if the books can hold it: refused here, not by the thread that reports it later.

    Args:
        what: Whose name it is, for the message.
        name: Such as `llm-0.node-3`.

    Raises:
        ConfigError: It is empty, too long, or has other characters, such as a slash.
    """
    if len(name) > MAX_NAME_LENGTH or re.fullmatch(NAME_PATTERN, name) is None:
        raise ConfigError(
            f"{what} {name!r} is not a name",
            remedy=f"Use up to {MAX_NAME_LENGTH} letters, digits and inner '. _ : -', "
            "for example 'Llama-3-8B'.",
        )
    return name


def socket_directory(configured: Path | None = None) -> Path:
    """A directory for lease channel sockets that only this user can write to; made if missing.

    Raises:
        ConfigError: The directory cannot be made, or others could replace sockets there.
    """
    directory = configured or _default_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_safe_directory(directory, trusted_uids())
    except OSError as error:
        raise ConfigError(
            f"cannot use {directory} for sockets: {error}",
            remedy="Point AQUA_SOCKET_DIR at a directory of this user.",
        ) from error
    return directory


def _default_directory() -> Path:
    system = Path("/run/aqua")
    if os.access(system, os.W_OK | os.X_OK):
        return system
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "aqua"
    return Path(tempfile.gettempdir()) / f"aqua-{os.getuid()}"

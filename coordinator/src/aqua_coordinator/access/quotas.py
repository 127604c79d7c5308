"""The quotas file: what tenants and consumers may have on lease, and how often they may ask.

Terms and sums are Kueue's (docs/operations/quotas.md): a nominal quota, a cohort whose tenants
borrow from each other what they leave unused, and limits to borrowing and to lending. The file is
followed: a coordinator that sees it change writes the quotas to the books, where grants check them.
Rates are not in the books: each coordinator keeps to them for what it is asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from aqua_coordinator.access.followed_file import FollowedFile
from aqua_protocol import ConfigError, parse_bytes
from aqua_protocol.ids import Name
from aqua_protocol.units import MAX_BYTES

if TYPE_CHECKING:
    from aqua_coordinator.store import Ledger

MAX_TENANTS: Final = 1024
"""Named in one file, chosen by hand: a listing of all takes 5 ms of Redis time. Doubled, 10."""
MAX_COHORT: Final = 64
"""Tenants of one cohort: a grant to one of them looks at all, 0.1 ms of Redis time, or twice that
if it comes alone. Doubled, so is that."""
MAX_CONSUMERS: Final = 65_536
"""Consumers with a limit of their own, one for each of the largest cluster. Doubled, replacing the
quotas holds Redis up for 0.2 s."""


def _size(value: object) -> object:
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise ValueError(error.message) from error


Size = Annotated[int, BeforeValidator(_size), Field(ge=0, le=MAX_BYTES)]
PerSecond = Annotated[float, Field(gt=0, le=1e6)]


class TenantQuota(BaseModel):
    """What one tenant may have; sizes are bytes, or text such as `64GiB`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nominal: Size = Field(MAX_BYTES, description="On lease, of its own right. Unset: no limit.")
    cohort: Name | None = Field(
        None, description="It lends to, and borrows from, the others there."
    )
    borrowing_limit: Size | None = Field(None, description="Beyond nominal. Unset: no limit.")
    lending_limit: Size | None = Field(None, description="Of nominal, to others. Unset: all.")
    consumer_limit: Size | None = Field(None, description="On lease of each of its consumers.")
    members: int | None = Field(
        None, ge=0, le=MAX_CONSUMERS, description="In the books at once. Unset: no limit."
    )
    grants_per_s: PerSecond | None = None
    reports_per_s: PerSecond | None = None

    @model_validator(mode="after")
    def _limits_are_of_a_cohort(self) -> Self:
        if self.cohort is None and (self.borrowing_limit, self.lending_limit) != (None, None):
            message = "borrowing_limit and lending_limit need a cohort"
            raise ValueError(message)
        if self.cohort is not None and "nominal" not in self.model_fields_set:
            message = "a tenant of a cohort needs a nominal quota"
            raise ValueError(message)
        return self

    @property
    def guaranteed(self) -> int:
        """What its cohort cannot borrow of its nominal quota."""
        return self.nominal - self.lent

    @property
    def lent(self) -> int:
        """What others may borrow of its nominal quota."""
        return self.nominal if self.lending_limit is None else min(self.nominal, self.lending_limit)


class QuotasFile(BaseModel):
    """The file's content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    tenants: dict[Name, TenantQuota] = Field(default_factory=dict, max_length=MAX_TENANTS)
    others: TenantQuota | None = Field(None, description="Each tenant that is not named.")
    consumers: dict[Name, Size] = Field(default_factory=dict, max_length=MAX_CONSUMERS)

    @model_validator(mode="after")
    def _cohorts_are_small_and_have_members(self) -> Self:
        if self.others is not None and self.others.cohort is not None:
            message = "tenants that are not named have no cohort"
            raise ValueError(message)
        if any(len(members) > MAX_COHORT for members in self.cohorts().values()):
            message = f"a cohort has at most {MAX_COHORT} tenants"
            raise ValueError(message)
        return self

    def cohorts(self) -> Mapping[str, dict[str, TenantQuota]]:
        """Tenants by cohort and name."""
        found: dict[str, dict[str, TenantQuota]] = {}
        for name, quota in self.tenants.items():
            if quota.cohort is not None:
                found.setdefault(quota.cohort, {})[name] = quota
        return found

    def of(self, tenant: str) -> TenantQuota | None:
        """What counts for a tenant; '' is none."""
        return self.tenants.get(tenant, self.others) if tenant else None

    def fields(self) -> Iterator[str]:
        """Fields of the books' hash and their values, in turn; see `lua/lib/quota.lua`."""
        others = {} if self.others is None else {"*": self.others}
        for name, quota in (self.tenants | others).items():
            limits = (quota.borrowing_limit, quota.guaranteed, quota.consumer_limit)
            words = (quota.nominal, *("-" if limit is None else limit for limit in limits))
            yield name
            yield " ".join(map(str, (*words, quota.cohort or "-")))
            yield f"#{name}"
            yield "-" if quota.members is None else str(quota.members)
        for cohort, members in self.cohorts().items():
            facts = (f"{name} {one.guaranteed} {one.nominal}" for name, one in members.items())
            yield f"@{cohort}"
            yield f"{sum(one.lent for one in members.values())}|{' '.join(facts)}"
        for name, limit in self.consumers.items():
            yield f"/{name}"
            yield str(limit)


def read_quotas(path: Path) -> QuotasFile:
    """Read and check the whole file.

    Raises:
        ConfigError: Missing, unreadable, or not a quotas file.
    """
    try:
        return QuotasFile.model_validate_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the quotas file {path}: {error}",
            remedy='Write {"tenants": {}} there, or unset AQUA_QUOTAS_FILE.',
        ) from error
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise ConfigError(
            f"{path} is not a quotas file: {where}: {fault['msg']}",
            remedy="See docs/operations/quotas.md for what it may say.",
        ) from error


_NO_QUOTAS: Final = QuotasFile()


class Quotas:
    """The quotas file, and whether the books have what it says.

    Args:
        path: None where there is none: quotas that the books have stay.

    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else FollowedFile(path, read_quotas)
        self._books_id: str | None = None

    @property
    def content(self) -> QuotasFile:
        """What the file said when it could last be read."""
        return _NO_QUOTAS if self._file is None else self._file.content

    async def keep(self, ledger: Ledger, books_id: str, *, has_quotas: bool = True) -> None:
        """Write to the books what they do not have from here: they are new, or the file is.

        Args:
            has_quotas: Whether the books have any. If not, those of the file are lost.

        Raises:
            UnavailableError: Redis does not answer; the next call tries again.
        """
        if self._file is None:
            return
        if self._file.refresh():
            self._books_id = None
        is_lost = not has_quotas and any(self.content.fields())
        if books_id != self._books_id or is_lost:
            words = [*self.content.fields()]
            text = json.dumps(words)
            version = hashlib.sha256(text.encode()).hexdigest()[:16] if words else ""
            await ledger.put_quotas(text, version)
            self._books_id = books_id

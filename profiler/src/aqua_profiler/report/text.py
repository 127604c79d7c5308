"""Profiles for people, for `aqua-place` and for Kubernetes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from aqua_protocol import format_bytes
from aqua_protocol.profile import ModelProfile, ProfileLabel

PREFIX: Final = "aqua.dev/"
"""Of Kubernetes labels and annotations."""

FIELDS: Final = ("spare_bytes", "needed_bytes", "stable_rate_per_s", "confidence")
ORIGINS: Final = ("measured_at", "workload_sha256", "engine", "hardware")
# Of a profile and of its provenance, those that annotations have where they have a value.
ANNOTATIONS: Final = tuple(
    PREFIX + name.replace("_", "-") for name in ("profile_version", "partial", *FIELDS, *ORIGINS)
)

LABEL_LENGTH: Final = 63
"""Fixed by Kubernetes: characters of a label's value."""

DEFAULT_HBM_GB: Final = 80.0
"""Fixed by the A100 and H100: GB of a GPU where no profile says it."""

# Fields of weight, in which two profiles are compared.
COMPARED: Final = (
    *("label", "spare_bytes", "needed_bytes", "stable_rate_per_s", "confidence", "partial"),
)


def sentence(profile: ModelProfile) -> str:
    """What the profile comes to."""
    rate = profile.stable_rate_per_s
    at = "" if rate is None else f" at its peak rate of {rate:.3g} requests/s"
    if profile.partial:
        return f"the profile is partial; {profile.model} has no label yet" + (
            "" if rate is None else f" (about {rate:.3g} requests/s so far)"
        )
    if profile.label is ProfileLabel.PRODUCER:
        return f"{profile.model} can lend {format_bytes(profile.spare_bytes or 0)}{at}"
    if profile.label is ProfileLabel.CONSUMER:
        planned = next((burst for burst in profile.bursts if burst.needed_bytes), None)
        why = "" if planned is None else f" to absorb a {planned.factor:g} x burst"
        return f"{profile.model} needs {format_bytes(profile.needed_bytes or 0)} of swap{why}"
    if profile.label is ProfileLabel.NEUTRAL:
        return f"{profile.model} neither spares enough nor needs swap{at}"
    return f"{profile.model} sustains{at.removeprefix(' at')}; what it spares is not known"


def lines_of(profile: ModelProfile) -> list[str]:
    """The profile, line by line."""
    lines = [sentence(profile), ""]

    def row(name: str, value: object) -> None:
        if value is not None and value != "":
            lines.append(f"{name:14s} {value}")

    row("label", profile.label.value)
    row("spare", None if profile.spare_bytes is None else format_bytes(profile.spare_bytes))
    row("needed", None if profile.needed_bytes is None else format_bytes(profile.needed_bytes))
    row("threshold", format_bytes(profile.threshold_bytes))
    if profile.stable_rate_per_s is not None:
        row("stable rate", f"{profile.stable_rate_per_s:.3f}/s")
    if profile.queue is not None:
        waiting, share = profile.queue.mean_length, profile.queue.waiting_share
        row("queue", f"{waiting:.2f} wait on average, any for {share:.0%} of the time")
    if profile.confidence is not None:
        row("confidence", f"{profile.confidence:.0%} that the truth is within 5%")
    row("limited by", profile.added("limited_by"))
    row("requests", profile.requests_sent)
    for burst in profile.bursts:
        row(
            f"burst {burst.factor:g} x",
            f"holds {format_bytes(burst.context_bytes)}, needs {format_bytes(burst.needed_bytes)}"
            f" of swap ({burst.requests} requests in {burst.seconds:.0f} s)",
        )
    origin = profile.provenance
    for name in ("measured_at", "hardware", "engine", "workload_sha256", "profiler", "command"):
        row(name.replace("_", " "), getattr(origin, name))
    lines += [f"note: {note}" for note in profile.notes]
    return lines


def differences(old: ModelProfile, new: ModelProfile) -> dict[str, dict[str, Any]]:
    """Fields of weight in which two profiles differ, with the ratio where it means something."""
    found: dict[str, dict[str, Any]] = {}
    for name in COMPARED:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        entry: dict[str, Any] = {"old": before, "new": after}
        numbers = isinstance(before, int | float) and isinstance(after, int | float)
        if numbers and not isinstance(before, bool) and before:
            entry["ratio"] = after / before
        found[name] = entry
    for name in ("hardware", "engine", "workload_sha256"):
        before, after = getattr(old.provenance, name), getattr(new.provenance, name)
        if before != after:
            found[f"provenance.{name}"] = {"old": before, "new": after}
    return found


def placer_input(
    profiles: Sequence[ModelProfile], servers: int, gpus: int, hbm_gb: float | None
) -> str:
    """A problem for `aqua-place`, in YAML; equal models become replicas.

    Without `hbm_gb` the GPUs are the largest that were profiled on: sizes then stay as measured.
    """
    import yaml

    if hbm_gb is None:
        measured = [profile.hbm_bytes for profile in profiles if profile.hbm_bytes]
        hbm_gb = max(measured) / 1e9 if measured else DEFAULT_HBM_GB
    models: dict[str, dict[str, Any]] = {}
    for profile in profiles:
        if profile.model in models:
            models[profile.model]["replicas"] += 1
        else:
            models[profile.model] = {
                "name": member_name(profile.model),
                "replicas": 1,
                "profile": profile.model_dump(mode="json", exclude=set(profile.model_extra or {})),
            }
    problem = {
        "version": 1,
        "servers": [{"name": "server", "count": servers, "gpus": gpus, "hbm_gb": hbm_gb}],
        "models": list(models.values()),
    }
    return yaml.safe_dump(problem, sort_keys=False)


def member_name(model: str) -> str:
    """A model's name as members are named: a path's or repository's last part, plain characters."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rsplit("/", 1)[-1]).strip("-._")
    return name[:128] or "model"


def kubernetes(profile: ModelProfile) -> dict[str, dict[str, str]]:
    """Labels to select by and annotations to read, for a Job's or a Deployment's metadata."""
    labels = {
        f"{PREFIX}role": "unknown" if profile.partial else profile.label.value,
        f"{PREFIX}model": member_name(profile.model)[:LABEL_LENGTH].strip("-._"),
    }
    annotations = {
        f"{PREFIX}profile-version": str(profile.version),
        f"{PREFIX}partial": str(profile.partial).lower(),
    }
    for name in FIELDS:
        value = getattr(profile, name)
        if value is not None:
            annotations[PREFIX + name.replace("_", "-")] = json.dumps(value)
    for name in ORIGINS:
        if value := getattr(profile.provenance, name):
            annotations[PREFIX + name.replace("_", "-")] = value
    return {"labels": labels, "annotations": annotations}

"""Step-time profiles as files of a folder, found by model, engine and GPU.

`aqua-profile steps` writes them, engines read them. A file's name is made of the three, so that a
folder may be shared by engines of all kinds, on one machine or as a volume of many. What a file
says of itself counts, not its name: a profile of something else is refused.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final, NamedTuple

from aqua_protocol.errors import ConfigError
from aqua_schedulers.conserve.profile import StepTimeProfile

DEFAULT_FOLDER: Final = Path("~/.cache/aqua/step-profiles")
"""Where profiles are kept unless another folder is named."""

NAME_LENGTH: Final = 40
"""Characters of the model in a file's name, for people: the digest behind it tells files apart.
Doubled, names of long models are cut later."""


class StepTimeKey(NamedTuple):
    """What a profile is of: a model, an engine with all that shapes its steps, a GPU."""

    model: str
    engine: str
    gpu: str

    def __str__(self) -> str:
        return f"{self.model} on {self.engine}, {self.gpu}"

    @property
    def file_name(self) -> str:
        """What the profile's file is called in a folder."""
        digest = hashlib.sha256("\n".join(self).encode()).hexdigest()[:12]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.model).strip("-._")[:NAME_LENGTH]
        return f"{name or 'model'}-{digest}.json"


def find_profile(place: Path | None, key: StepTimeKey) -> StepTimeProfile:
    """Read the profile of an engine.

    Args:
        place: A folder of profiles, or one profile; None for the usual folder.
        key: What the engine is.

    Raises:
        ConfigError: There is none, it cannot be read, or it is of something else. An engine goes on
            without one, on a fixed budget, and says why.
    """
    place = (place or DEFAULT_FOLDER).expanduser()
    path = place if place.suffix == ".json" else place / key.file_name
    try:
        profile = StepTimeProfile.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"no step-time profile of {key}: {path}: {error.strerror or error}",
            remedy="Measure it with `aqua-profile steps`.",
        ) from error
    found = StepTimeKey(profile.model, profile.engine, profile.gpu)
    if found != key:
        raise ConfigError(
            f"{path} is the step-time profile of {found}, not of {key}",
            remedy="Measure this engine with `aqua-profile steps`.",
        )
    return profile

"""Makes a release: one version of all distributions, as wheels that depend on each other exactly.

    python deploy/release.py bump 0.2.0    set the version everywhere, and date the changelog
    python deploy/release.py check         compare all that say it; exit 1 and name what lacks
    python deploy/release.py build dist    the wheels, and their checksums
    python deploy/release.py bills dist    what each image installs, as CycloneDX, and checksums

A version is said by every `pyproject.toml`, by the requirements of our distributions on each other,
by the changelog, by the chart, by what names images (the compose file, the page on installing), and
by a tag. `check` compares them all, and wants the images' base by digest; nothing is built from a
tree in which they disagree, unless one builds without checking.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
OURS: Final = re.compile(r'"(aqua(?:lib|-[a-z]+)(?:\[[a-z,]+\])?)(==[0-9a-z.]+)?"')
"""A requirement on one of our distributions, in quotes, and the version that it asks for."""
VERSION: Final = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
IMAGES: Final = {
    "helm/aqua/Chart.yaml": re.compile(r'(?<=^appVersion: ")[^"\n]+', re.MULTILINE),
    "deploy/compose/compose.yaml": re.compile(r"(?<=\$\{AQUA_TAG:-)[^}]+"),
    "docs/operations/install.md": re.compile(r"(?<=/aqua/\$service:)\S+"),
}
"""Files that name images of a version, and where in them it stands."""
CHART: Final = "helm/aqua/Chart.yaml"
CHART_VERSION: Final = re.compile(r"(?<=^version: )\S+", re.MULTILINE)
BASE: Final = re.compile(r"(?<=^ARG BASE=)\S+", re.MULTILINE)
PINNED: Final = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")
"""A base that is always the same one: its index, so every platform's image."""
UNRELEASED: Final = "## [Unreleased]\n"


def dockerfiles(root: Path) -> list[Path]:
    """One of each image, named by its service."""
    return sorted(root.glob("docker/*.Dockerfile"))


def chart_version(version: str) -> str:
    """The chart's: that of all, as Helm writes it (`1.2.3-rc.1` for 1.2.3rc1)."""
    return version.replace("rc", "-rc.")


def projects(root: Path) -> list[Path]:
    """The `pyproject.toml` of each distribution."""
    return sorted(root.glob("*/pyproject.toml"))


def version_of(root: Path) -> str:
    """The version of all distributions: that of the one which all others require."""
    text = (root / "protocol" / "pyproject.toml").read_text(encoding="utf-8")
    version: str = tomllib.loads(text)["project"]["version"]
    return version


def disagreements(root: Path, *, is_tagged: bool = True) -> Iterator[str]:
    """What keeps this tree from being the release of its version; nothing if it is one.

    Args:
        root: Of the repository.
        is_tagged: Whether the tag and a clean tree are asked for, too.
    """
    version = version_of(root)
    for path in projects(root):
        text = path.read_text(encoding="utf-8")
        where = path.relative_to(root)
        if VERSION.findall(text) != [version]:
            yield f"{where}: its version is not {version}"
        _, _, requirements = text.partition("\ndependencies = ")
        for name, pin in OURS.findall(requirements):
            if pin != f"=={version}":
                yield f"{where}: requires {name}{pin}, not {name}=={version}"
    yield from _unlike(root, version)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE
    ):
        yield f"CHANGELOG.md: no dated section [{version}]"
    unreleased = changelog.partition(UNRELEASED)[2].partition("\n## [")[0]
    if unreleased.strip():
        yield "CHANGELOG.md: something is [Unreleased]; `bump` to the next version"
    if is_tagged:
        yield from _untagged(root, version)


def _unlike(root: Path, version: str) -> Iterator[str]:
    """What of the chart and the images is not of this version, or not pinned."""
    for place, named in IMAGES.items():
        if set(named.findall((root / place).read_text(encoding="utf-8"))) != {version}:
            yield f"{place}: its images are not of {version}"
    if CHART_VERSION.findall((root / CHART).read_text("utf-8")) != [chart_version(version)]:
        yield f"{CHART}: its version is not {chart_version(version)}"
    for path in dockerfiles(root):
        if not all(map(PINNED.fullmatch, BASE.findall(path.read_text(encoding="utf-8")))):
            where = path.relative_to(root)
            yield f"{where}: BASE has no digest; `bump VERSION --base NAME@sha256:...`"


def _untagged(root: Path, version: str) -> Iterator[str]:
    if _git(root, "status", "--porcelain"):
        yield "the tree has changes that are not committed"
    if f"v{version}" not in _git(root, "tag", "--points-at", "HEAD").split():
        yield f"this commit is not tagged v{version}: git tag -a v{version}"


def bump(root: Path, version: str, today: dt.date, base: str | None = None) -> None:
    """Set the version everywhere but in the tag, and give what is unreleased its name and date.

    Args:
        root: Of the repository.
        version: Of all distributions, the chart and the images.
        today: Of the changelog's section.
        base: What images are built on, by digest; None leaves what the Dockerfiles say.

    Raises:
        ValueError: It is not of the form `1.2.3`, nothing is unreleased, it was released, or the
            base has no digest.
    """
    if base is not None and not PINNED.fullmatch(base):
        raise ValueError(f"{base} has no digest: write NAME@sha256: and its 64 digits")
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise ValueError(f"{version} is no version: write 1.2.3 or 1.2.3rc1")
    log = root / "CHANGELOG.md"
    changelog = log.read_text(encoding="utf-8")
    if f"## [{version}]" in changelog:
        raise ValueError(f"{version} was released: CHANGELOG.md has its section")
    if not changelog.partition(UNRELEASED)[2].partition("\n## [")[0].strip():
        raise ValueError("CHANGELOG.md has nothing under [Unreleased]: say what is new")
    dated = f"{UNRELEASED}\n## [{version}] - {today.isoformat()}\n"
    log.write_text(changelog.replace(UNRELEASED, dated, 1), encoding="utf-8")
    for path in projects(root):
        text = VERSION.sub(f'version = "{version}"', path.read_text(encoding="utf-8"))
        head, opens, requirements = text.partition("\ndependencies = ")
        requirements = OURS.sub(rf'"\1=={version}"', requirements)
        path.write_text(head + opens + requirements, encoding="utf-8")
    for place, named in IMAGES.items():
        path = root / place
        path.write_text(named.sub(version, path.read_text(encoding="utf-8")), encoding="utf-8")
    chart = root / CHART
    told = CHART_VERSION.sub(chart_version(version), chart.read_text(encoding="utf-8"))
    chart.write_text(told, encoding="utf-8")
    for path in dockerfiles(root) if base else []:
        path.write_text(BASE.sub(base or "", path.read_text(encoding="utf-8")), encoding="utf-8")


def build(root: Path, folder: Path) -> list[Path]:
    """Build a wheel of each distribution into an empty folder, with `SHA256SUMS` beside them.

    The same commit gives the same bytes: by one builder, and files are dated by the commit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    sources = [str(path.parent) for path in projects(root)]
    # With the hatchling of constraints.txt, not with that of the day.
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    pip = [sys.executable, "-m", "pip", "wheel", *options]
    dated = {"SOURCE_DATE_EPOCH": _git(root, "log", "-1", "--format=%ct").strip()}
    subprocess.run([*pip, *sources], check=True, env={**os.environ, **dated})  # noqa: S603 - pip
    _sum_up(folder)
    return sorted(folder.glob("*.whl"))


def installed_by(dockerfile: Path) -> list[str]:
    """What an image installs of ours, as pip takes it: folders, with their extras."""
    _, _, line = dockerfile.read_text(encoding="utf-8").partition("--constraint constraints.txt")
    return shlex.split(line.partition("&&")[0].partition("\n\n")[0].replace("\\\n", ""))


def bills(root: Path, folder: Path, cyclonedx: Path) -> list[Path]:
    """Write a bill of materials of what each image installs, and `SHA256SUMS` of the folder.

    Of this machine's Python and platform, by installing it: the index is asked for all that is not
    ours. What the base has, Debian's packages and Python, is in the base's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for dockerfile in dockerfiles(root):
        service = dockerfile.stem
        bill = folder.resolve() / f"aqua-{service}-{version_of(root)}.cdx.json"
        with tempfile.TemporaryDirectory(prefix="aqua-") as place:
            run = partial(subprocess.run, check=True, cwd=root)
            run([sys.executable, "-m", "venv", "--without-pip", place])
            python = Path(place) / "bin" / "python"
            pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
            run([*pip, "--constraint", "constraints.txt", *installed_by(dockerfile)])
            for where in Path(place).glob("lib/*/site-packages/*.dist-info/direct_url.json"):
                where.unlink()  # A path on this machine is nobody's business.
            about = ["--pyproject", root / service / "pyproject.toml", "--output-reproducible"]
            run([cyclonedx, "environment", *about, "--output-file", bill, python])
        written.append(bill)
    _sum_up(folder)
    return written


def _sum_up(folder: Path) -> None:
    """Write the checksums of all that is in it, as `sha256sum --check` reads them."""
    sums = folder / "SHA256SUMS"
    files = sorted(path for path in folder.iterdir() if path != sums)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    sums.write_text("".join(lines), encoding="utf-8")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - git


def main() -> int:
    """Run one of the four; the exit code says whether it could be done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("check", help="compare version, changelog, chart and tag")
    bumping = verbs.add_parser("bump", help="set the version everywhere")
    bumping.add_argument("version")
    bumping.add_argument("--base", help="what images are built on, by digest: NAME@sha256:...")
    verbs.add_parser("build", help="build the wheels").add_argument("folder", type=Path)
    billing = verbs.add_parser("bills", help="write what each image installs, as CycloneDX")
    billing.add_argument("folder", type=Path)
    billing.add_argument("--with", dest="cyclonedx", type=Path, required=True, help="cyclonedx-py")
    given = parser.parse_args()
    try:
        if given.verb == "bump":
            bump(ROOT, given.version, dt.datetime.now(dt.UTC).date(), given.base)
            print(f"now: commit this as {given.version}, and git tag -a v{given.version}")
        elif given.verb == "build":
            print(*build(ROOT, given.folder), sep="\n")
        elif given.verb == "bills":
            print(*bills(ROOT, given.folder, given.cyclonedx.resolve()), sep="\n")
        else:
            faults = list(disagreements(ROOT))
            print("\n".join(faults) or f"this commit is {version_of(ROOT)}")
            return bool(faults)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

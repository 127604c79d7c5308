"""What `aqua doctor` does: asks every probe that is installed, and shows what they found.

Two probes are the doctor's own: Python and the versions of distributions. Whatever else there is
to know, a distribution knows of itself, and offers a probe by an entry point of `aqua.doctor`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from aqua_cli.distributions import disagreement, installed
from aqua_protocol.findings import Finding, FindingLevel, Probe

PROBES_GROUP: Final = "aqua.doctor"
NARROWEST: Final = 60
"""Letters of a line at least: in less no path or address can be copied. Doubled, lines are longer
than a usual terminal is wide."""
STYLES: Final = {
    FindingLevel.OK: "green",
    FindingLevel.WARN: "yellow",
    FindingLevel.FAIL: "bold red",
}


def probes() -> dict[str, Probe]:
    """Find the probes that are installed, the doctor's own first; none is loaded yet."""
    others = sorted(entry_points(group=PROBES_GROUP))
    return {"python": probe_python, "versions": probe_versions} | {
        entry.name: partial(_run_probe, entry) for entry in others
    }


def _run_probe(entry: EntryPoint) -> Iterable[Finding]:
    probe: Probe = entry.load()
    return probe()


def examine(*, on_probe: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Ask every probe; one that breaks is itself a finding and spoils no other."""
    findings: list[Finding] = []
    for name, probe in probes().items():
        on_probe(name)
        try:
            findings += probe()
        except Exception as error:  # noqa: BLE001 - a broken installation is what this looks for
            findings.append(
                Finding(
                    check=name,
                    level=FindingLevel.FAIL,
                    message=f"the probe broke: {type(error).__name__}: {error}",
                    remedy="Install one version of all distributions again.",
                )
            )
    return findings


def probe_python() -> Iterator[Finding]:
    """Name the interpreter; an installation for an older one does not get this far."""
    yield Finding(
        check="Python",
        level=FindingLevel.OK,
        message=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        details={"executable": sys.executable},
    )


def probe_versions() -> Iterator[Finding]:
    """Compare the distributions of Aqua, which are released together."""
    versions = installed()
    differs = disagreement(versions)
    yield Finding(
        check="distributions",
        level=FindingLevel.FAIL if differs else FindingLevel.OK,
        message=differs or ", ".join(f"{name} {found}" for name, found in versions.items()),
        remedy="Install one version of all." if differs else "",
        details=dict(versions),
    )


def render(findings: Sequence[Finding]) -> None:
    """Print findings for people: a line each, and the remedy under those that need one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        words = Text(finding.message)
        if finding.remedy:
            words.append(f"\n{finding.remedy}", "dim")
        table.add_row(Text(finding.level, STYLES[finding.level]), finding.check, words)
    Console(width=max(NARROWEST, Console().width)).print(table)

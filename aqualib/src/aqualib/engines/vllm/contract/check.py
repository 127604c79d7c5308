"""The import contract: does a vLLM have all that Aqua uses of it, and what of that has changed?

    python -m aqualib.engines.vllm.contract                         the one installed here
    python -m aqualib.engines.vllm.contract vllm-0.34.0-....whl     a wheel, or a folder with `vllm`
    python -m aqualib.engines.vllm.contract --accept contract.json  and opt in, if it holds

It reads sources and imports neither vLLM nor torch: seconds for a version, on any machine. A name
that is missing breaks the contract. A function that Aqua overrides or calls and that reads
differently from the version before is named, to be read. The contracts of the versions
that Aqua knows lie in `accepted/`, one file each, in the form that `--accept` writes.

Holding it is no proof: a change of meaning behind an unchanged function is not seen, and neither is
anything that a GPU would do. That is what the engine tests are for.

An engine compares the sources that it runs as it starts (`warn_of_changes`): a patch release has
the same names, and may mean something else by them. It says so and starts, for most changes mean
nothing to Aqua.

Exit codes: 0 it holds; 1 it does not, or a version that Aqua knows reads differently from what is
written down of it; 2 wrong usage; 3 there is no vLLM.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

from aqualib.engines.vllm.contract.source import FUNCTIONS, VllmSource, is_abstract
from aqualib.engines.vllm.contract.surface import IMPLEMENTED, SURFACE
from aqualib.engines.vllm.contract.versions import OPT_IN, TRY_CONTRACT, opted_in

logger: Final = logging.getLogger("aqualib")

OURS: Final = "aqualib.engines.vllm"


class Contract(NamedTuple):
    """What a version has of the surface.

    Attributes:
        version: Of vLLM, as its sources say.
        fingerprints: Of each function of the surface, by `module:Class.name`.
        missing: Names of the surface that it lacks, and abstract methods that we lack.
    """

    version: str
    fingerprints: Mapping[str, str]
    missing: Sequence[str] = ()

    def as_json(self) -> str:
        """The contract as a file has it."""
        content = {"vllm": self.version, "fingerprints": dict(sorted(self.fingerprints.items()))}
        return json.dumps(content, indent=1) + "\n"

    def changed_since(self, other: Contract) -> list[str]:
        """Functions that `other` has in other words, or under another name."""
        return sorted(
            name
            for name in self.fingerprints
            if self.fingerprints[name] != other.fingerprints.get(name)
        )


def read_contract(source: VllmSource) -> Contract:
    """Look for the whole surface in the sources of a vLLM."""
    fingerprints: dict[str, str] = {}
    missing: list[str] = []
    for key, listed in SURFACE.items():
        module, _, owner = key.partition(":")
        found = source.find(module, owner)
        if found is None:
            missing.append(key)
        elif not isinstance(found.node, ast.ClassDef):
            fingerprints[key] = source.fingerprint(found.module, found.node)
        else:
            members = source.members(found)
            for names in listed:
                there = [name for name in names.split("|") if name in members]
                if not there:
                    missing.append(f"{key}.{names}")
                for name in there:
                    home, node = members[name]
                    if isinstance(node, FUNCTIONS):
                        fingerprints[f"{key}.{name}"] = source.fingerprint(home, node)
            if ours := IMPLEMENTED.get(key):
                wanted = {name for name, (_, node) in members.items() if is_abstract(node)}
                missing += [f"{ours} has no {name}" for name in sorted(wanted - _our_members(ours))]
    return Contract(source.version(), fingerprints, missing)


def _our_members(ours: str) -> set[str]:
    module, _, name = ours.partition(":")
    path = f"{module.replace('.', '/')}.py"
    text = resources.files(OURS).joinpath(path).read_text(encoding="utf-8")
    (node,) = [
        each
        for each in ast.parse(text).body
        if isinstance(each, ast.ClassDef) and each.name == name
    ]
    return {each.name for each in node.body if isinstance(each, FUNCTIONS)}


def known_contracts() -> dict[str, Contract]:
    """The contracts of the versions that Aqua knows, oldest first."""
    found = {}
    for file in resources.files(__package__).joinpath("accepted").iterdir():
        if file.name.endswith(".json"):
            content = json.loads(file.read_text(encoding="utf-8"))
            found[content["vllm"]] = Contract(content["vllm"], content["fingerprints"])
    return {version: found[version] for version in sorted(found, key=_order)}


def _order(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def nearest(version: str) -> Contract:
    """What a version is compared with: itself if Aqua knows it, or the newest before it."""
    known = list(known_contracts().values())
    older = [each for each in known if _order(each.version) <= _order(version)]
    return older[-1] if older else known[0]


def installed_place() -> Path | None:
    """The folder that holds the installed vLLM, which is not imported; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def warn_of_changes(version: str) -> None:
    """Say, once, what the installed vLLM has in other words than the one that Aqua knows.

    Compared with the contract that the operator opted in to for this version, if there is one.
    """
    place = installed_place()
    if place is not None:
        _warn_of_changes(version, place)


@cache
def _warn_of_changes(version: str, place: Path) -> None:
    accepted = opted_in(version)
    known = nearest(version) if accepted is None else Contract(version, accepted)
    # Syntax trees are many objects, for which the collector would look at all of torch's again and
    # again: three quarters of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        found = read_contract(VllmSource(place))
    finally:
        if collects:
            gc.enable()
    if names := [*found.missing, *found.changed_since(known)]:
        logger.warning(
            "vLLM %s reads differently from the %s that Aqua knows: %s. After a look at it, "
            "`%s` and %s=vllm-contract.json accept it",
            version,
            known.version,
            ", ".join(name.partition(":")[2] for name in names),
            TRY_CONTRACT,
            OPT_IN,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {OURS}.contract",
        description="Check a vLLM for all that Aqua uses of it, without importing it.",
    )
    parser.add_argument("place", nargs="*", type=Path, help="a wheel, or a folder with vllm in it")
    parser.add_argument(
        "--accept",
        type=Path,
        metavar="FILE",
        help="write it down, if it holds; several into a folder",
    )
    parser.add_argument("--json", action="store_true", help="say it for machines")
    options = parser.parse_args(arguments)
    installed = installed_place()
    places = options.place or [each for each in [installed] if each is not None]
    if not places or not all(place.exists() for place in places):
        sys.stderr.write("no vLLM there: name a wheel, or a folder that holds `vllm`\n")
        return 3
    contracts = [read_contract(VllmSource(place)) for place in places]
    findings = [_findings(each) for each in contracts]
    if options.json:
        sys.stdout.write(json.dumps(findings, indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for each in findings for line in _lines(each))
    if any(each.missing or not each.version for each in contracts):
        return 1
    if options.accept is None:
        # Of a version that Aqua knows, nothing may read differently.
        return int(
            any(each["changed"] and each["compared_with"] == each["vllm"] for each in findings)
        )
    for each in contracts:
        is_folder = options.accept.is_dir()
        path = options.accept / f"{each.version}.json" if is_folder else options.accept
        path.write_text(each.as_json(), encoding="utf-8")
        sys.stderr.write(f"written; to run it: export {OPT_IN}={path}\n")
    return 0


def _findings(contract: Contract) -> dict[str, Any]:
    base = nearest(contract.version)
    return {
        "vllm": contract.version,
        "missing": list(contract.missing),
        "compared_with": base.version,
        "changed": contract.changed_since(base),
    }


def _lines(findings: Mapping[str, Any]) -> Iterator[str]:
    verdict = "breaks" if findings["missing"] or not findings["vllm"] else "holds"
    yield f"vLLM {findings['vllm'] or 'of no version'} {verdict} the contract"
    yield from (f"  missing: {name}" for name in findings["missing"])
    base = findings["compared_with"]
    yield from (f"  reads differently from {base}: {name}" for name in findings["changed"])

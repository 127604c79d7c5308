"""The import contract finds what a vLLM has, lacks and has changed, by its sources alone."""

from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import aqualib.engines.vllm
from aqua_protocol import ConfigError
from aqualib.engines.vllm.contract import check, surface
from aqualib.engines.vllm.contract.check import (
    known_contracts,
    main,
    nearest,
    read_contract,
    warn_of_changes,
)
from aqualib.engines.vllm.contract.source import VllmSource
from aqualib.engines.vllm.contract.surface import IMPLEMENTED, SURFACE, USED, USED_TO_LEND
from aqualib.engines.vllm.contract.versions import (
    MINORS,
    OPT_IN,
    TRY_CONTRACT,
    WARNED_MINORS,
    require_supported,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

ENGINE: Final = Path(aqualib.engines.vllm.__file__).parent
ROOT: Final = Path(__file__).parents[3]
SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"

FILES: Final = {
    "vllm/_version.py": "__version__ = version = '0.99.1'\n",
    "vllm/base.py": """
class Base(Generic[T]):
    kept: int = 0

    def __init__(self):
        self.set_at_the_start = 1

    def inherited(self):
        return 1
""",
    "vllm/names.py": "from vllm.base import Base as Root\n",
    "vllm/engine.py": '''
from vllm.names import Root

class Engine(Root):
    listed = None

    async def called(self, x):
        """What it does."""
        # Why.
        return "# no comment" + x  # Because.

def function():
    return 2
''',
}
USES: Final = {
    "vllm.engine:Engine": ("called", "inherited", "kept", "listed", "new|set_at_the_start"),
    "vllm.engine:function": (),
}


@pytest.fixture(autouse=True)
def _small_surface(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "tree" in request.fixturenames:
        monkeypatch.setattr(check, "SURFACE", USES)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return written(tmp_path, FILES)


def written(place: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


def changed(place: Path, name: str, old: str, new: str) -> list[str]:
    """Fingerprints that differ after a change."""
    before = read_contract(VllmSource(place))
    assert old in FILES[name]
    written(place, {name: FILES[name].replace(old, new)})
    return before.changed_since(read_contract(VllmSource(place)))


def test_names_are_found_through_imports_bases_and_what_methods_set(tree: Path) -> None:
    found = read_contract(VllmSource(tree))
    assert (found.version, found.missing) == ("0.99.1", [])
    assert list(found.fingerprints) == [
        "vllm.engine:Engine.called",
        "vllm.engine:Engine.inherited",
        "vllm.engine:function",
    ]


def test_a_wheel_reads_as_its_folder_does(tree: Path) -> None:
    wheel = tree / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in FILES:
            archive.write(tree / name, name)
    assert read_contract(VllmSource(wheel)) == read_contract(VllmSource(tree))


@pytest.mark.parametrize(
    ("name", "old", "new", "missing"),
    [
        ("vllm/engine.py", "def called", "def renamed", "vllm.engine:Engine.called"),
        ("vllm/base.py", "self.set_at_the_start", "self.other", "vllm.engine:Engine.new|set_at_"),
        ("vllm/base.py", "class Base", "class Moved", "vllm.engine:Engine.inherited"),
        ("vllm/engine.py", "def function", "def action", "vllm.engine:function"),
        ("vllm/engine.py", "class Engine", "class Motor", "vllm.engine:Engine"),
    ],
)
def test_what_is_gone_is_said_by_name(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, missing: str
) -> None:
    written(tree, {name: FILES[name].replace(old, new)})
    assert main([str(tree)]) == 1
    told = capsys.readouterr().out
    assert "vLLM 0.99.1 breaks the contract" in told
    assert f"missing: {missing}" in told


def test_what_reads_differently_is_said_by_name(tree: Path) -> None:
    assert changed(tree, "vllm/base.py", "return 1", "return 3") == ["vllm.engine:Engine.inherited"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("What it does.", "What is done."), ("# Why.", ""), ("  # Because.", "\n")],
)
def test_comments_and_docstrings_do_not_count(tree: Path, old: str, new: str) -> None:
    assert not changed(tree, "vllm/engine.py", old, new)
    assert changed(tree, "vllm/engine.py", "# no comment", "# a comment")


def test_an_abstract_method_that_we_do_not_implement_is_missing(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        check, "IMPLEMENTED", {"vllm.engine:Engine": "requests.queue:PolicyRequestQueue"}
    )
    abstract = "@abc.abstractmethod\n    async def called"
    written(tree, {"vllm/engine.py": FILES["vllm/engine.py"].replace("async def called", abstract)})
    (missing,) = read_contract(VllmSource(tree)).missing
    assert missing == "requests.queue:PolicyRequestQueue has no called"


def test_whoever_has_tried_the_contract_may_opt_in_to_that_version_alone(
    tree: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"0\.99\.1 is not supported") as refused:
        require_supported("0.99.1")
    assert "aqualib.engines.vllm.contract --accept" in str(refused.value.remedy)
    accepted = tree / "vllm-contract.json"
    assert main([str(tree), "--accept", str(accepted)]) == 0
    monkeypatch.setenv(OPT_IN, str(accepted))
    with caplog.at_level(logging.WARNING, "aqualib"):
        require_supported("0.99.1")
        require_supported("0.99.1")
    assert caplog.text.count("not all of Aqua's engine tests have run") == 1
    with pytest.raises(ConfigError, match=r"0\.99\.2 is not supported"):
        require_supported("0.99.2")


@pytest.mark.parametrize("content", [None, "[]", "{}", '{"vllm": "0.99.1"}', "what"])
def test_an_opt_in_that_is_no_contract_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    place = tmp_path / "contract.json"
    if content is not None:
        place.write_text(content)
    monkeypatch.setenv(OPT_IN, str(place))
    with pytest.raises(ConfigError, match="is not a contract"):
        require_supported("0.99.1")


def test_a_contract_that_breaks_is_not_accepted(tree: Path) -> None:
    written(tree, {"vllm/engine.py": "class Engine: pass\n"})
    assert main([str(tree), "--accept", str(tree / "out.json")]) == 1
    assert not (tree / "out.json").exists()


def test_a_known_version_has_to_read_as_it_is_written_down(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tree / "contracts"
    place.mkdir()
    assert main([str(tree), "--accept", str(place)]) == 0
    known = read_contract(VllmSource(tree))
    assert json.loads((place / "0.99.1.json").read_text())["fingerprints"] == known.fingerprints
    monkeypatch.setattr(check, "known_contracts", lambda: {known.version: known})
    assert main([str(tree)]) == 0
    written(tree, {"vllm/base.py": FILES["vllm/base.py"].replace("return 1", "return 3")})
    assert main([str(tree)]) == 1
    told = capsys.readouterr().out
    assert "reads differently from 0.99.1: vllm.engine:Engine.inherited" in told


def test_a_start_says_once_what_reads_differently_until_that_is_accepted(
    tree: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = read_contract(VllmSource(tree))._replace(version="0.98.0")
    monkeypatch.setattr(check, "known_contracts", lambda: {known.version: known})
    monkeypatch.setattr(check, "installed_place", lambda: tree)
    warn_of_changes("0.98.0")
    assert not caplog.messages
    written(tree, {"vllm/base.py": FILES["vllm/base.py"].replace("return 1", "return 3")})
    for _ in range(2):
        warn_of_changes("0.98.1")
    (said,) = caplog.messages
    assert "vLLM 0.98.1 reads differently from the 0.98.0" in said
    assert "Engine.inherited. " in said
    assert TRY_CONTRACT in said
    assert main([str(tree), "--accept", str(tree / "contract.json")]) == 0
    monkeypatch.setenv(OPT_IN, str(tree / "contract.json"))
    warn_of_changes("0.99.1")
    assert caplog.messages == [said]


def test_findings_are_there_for_machines(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree), "--json"]) == 0
    (findings,) = json.loads(capsys.readouterr().out)
    assert (findings["vllm"], findings["missing"]) == ("0.99.1", [])
    assert findings["compared_with"] == list(known_contracts())[-1]
    assert "vllm.engine:function" in findings["changed"]


def test_a_place_without_a_vllm(tmp_path: Path) -> None:
    assert main([str(tmp_path / "nowhere")]) == 3
    assert main([str(tmp_path)]) == 1


def test_every_minor_version_has_its_contract_and_every_contract_the_same_names() -> None:
    known = known_contracts()
    minors = [version.rpartition(".")[0] for version in known]
    assert minors == sorted([*MINORS, *WARNED_MINORS])
    assert nearest("0.31.7").version == "0.31.0"
    assert nearest("0.32.0+cu129").version == "0.32.0"
    assert nearest("0.32.1rc2").version == "0.32.0"
    newest = set(list(known.values())[-1].fingerprints)
    for each in known.values():
        assert set(each.fingerprints) == newest, each.version


def test_the_newest_is_what_the_engine_tests_run_on() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\nVLLM_NEWEST := {MINORS[-1]}." in makefile


def test_what_starts_without_a_warning_has_run() -> None:
    runs = json.loads((ROOT / "docs/measurements/vllm-runs.json").read_text(encoding="utf-8"))
    passed = Counter[tuple[str, str]]()
    for version, modules in runs.items():
        minor = version.rpartition(".")[0]
        for module, ran in modules.items():
            assert not ran.get("failed") or minor not in MINORS, (version, module)
            passed[minor, Path(module).stem] += ran.get("passed", 0)
    for minor in MINORS[:-1]:
        for module in ("schedulers", "paging", "lending"):
            assert passed[minor, f"test_vllm_{module}"], (minor, module)


def test_the_command_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys; import aqualib.engines.vllm.contract.check; "
        "print({'torch', 'vllm'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert said.stdout == b"set()\n"


def test_what_is_looked_for_at_a_start_is_in_the_contract() -> None:
    by_class = {key.partition(":")[2]: set(listed) for key, listed in SURFACE.items()}
    for table in (USED, USED_TO_LEND):
        for owner, listed in table.items():
            assert set(listed) <= by_class[owner], owner
    assert set(IMPLEMENTED) <= set(SURFACE)


def test_our_schedulers_use_and_override_nothing_of_vllms_that_is_not_in_the_contract() -> None:
    """What they take from `self`, and do not make themselves, is vLLM's."""
    used: set[str] = set()
    made: set[str] = set()
    for name in (
        "scheduler.py",
        "scheduling/eviction_scheduler.py",
        "scheduling/aborting_scheduler.py",
        "scheduling/co_serving_scheduler.py",
        "lending/scheduler.py",
    ):
        for node in ast.walk(ast.parse((ENGINE / name).read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"self", "super()"}:
                own = ast.unparse(node.value) == "self" and isinstance(node.ctx, ast.Store)
                (made if own else used).add(node.attr)
            elif isinstance(node, ast.ClassDef):
                made |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()":
                used.add(node.attr)
    names = {name for listed in SURFACE[SCHEDULER] for name in listed.split("|")}
    inherited = used - made - {"__init__"}
    assert inherited <= names, f"add to {surface.__name__}: {inherited - names}"


def test_all_that_is_imported_of_vllm_is_in_the_contract() -> None:
    owners = {key.partition(":")[2] for key in SURFACE}
    # The one vLLM makes when it is asked for; of the other, a module, the functions are in it.
    undefined = {"current_platform", "kv_transfer_state"}
    imported = {
        alias.name
        for path in ENGINE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
    }
    missing = imported - undefined - owners
    assert not missing, f"add to {surface.__name__}: {missing}"

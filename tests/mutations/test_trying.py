"""A mutation that a test notices is killed, and what becomes of every other one is said."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutations.copied_tree import CopiedTree
from tests.mutations.listed import Mutation
from tests.mutations.trying import Tried, Verdict, table, try_all

FILES = {
    "setup.cfg": "[tool:pytest]\naddopts = -q\n",
    "doubled.py": "def doubled(number: int) -> int:\n    return 2 * number + 0\n",
    "tests/mutations/test_imported.py": "def test_modules_are_those_beside_the_tests():\n    pass\n",
    "tests/test_doubled.py": "from doubled import doubled\n\ndef test_two():\n    assert doubled(2) == 4\n\n"
    "def test_zero():\n    assert doubled(0) == 0\n\ndef test_wrong():\n    assert doubled(1) == 3\n",
}
KILLED = Mutation(
    name="square",
    kind="a wrong operation",
    file="doubled.py",
    before="2 * number",
    after="3 * number",
    wrong="numbers are too large",
    killed_by="tests/test_doubled.py::test_two",
)


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that need none start sooner."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "untracked.py").write_text("")
    (root / "linked.py").symlink_to("doubled.py")
    for command in ("init --quiet", "add setup.cfg doubled.py linked.py tests"):
        subprocess.run(["git", *command.split()], cwd=root, check=True)
    return root


def test_a_copy_has_what_is_tracked_and_its_links_are_links(tree: Path, tmp_path: Path) -> None:
    CopiedTree.of(tree, tmp_path / "copy")
    assert not (tmp_path / "copy/untracked.py").exists()
    assert (tmp_path / "copy/linked.py").readlink() == Path("doubled.py")


def test_a_mutation_is_there_only_within(tree: Path, tmp_path: Path) -> None:
    copy = CopiedTree.of(tree, tmp_path)
    with copy.mutated(KILLED) as applies:
        assert applies
        assert "3 * number" in (tmp_path / "doubled.py").read_text()
    assert (tmp_path / "doubled.py").read_text() == FILES["doubled.py"]
    with copy.mutated(replace(KILLED, before="number")) as applies:
        assert not applies


@pytest.mark.slow
def test_every_verdict_is_that_of_the_tests(tree: Path, tmp_path: Path) -> None:
    given = {
        KILLED: Verdict.KILLED,
        replace(KILLED, name="none", before="+ 0", after="- 0"): Verdict.TIER_FAILS,
        replace(KILLED, name="other", killed_by="tests/test_doubled.py::test_zero"): Verdict.BY_ANOTHER,
        replace(KILLED, name="gone", before="4 * number"): Verdict.DOES_NOT_APPLY,
        replace(KILLED, name="broken", killed_by="tests/test_doubled.py::test_wrong"): Verdict.KILLER_FAILS,
    }
    told: list[Tried] = []
    found = try_all(list(given), tree, tmp_path, tier="check", jobs=2, tell=told.append)
    assert {one.mutation: one.verdict for one in found} == given
    assert {one.mutation for one in told} == {*given}
    assert [one.test for one in found if one.verdict is Verdict.BY_ANOTHER] == ["tests/test_doubled.py::test_two"]
    assert [*table(found)][-1].startswith("check: 5 mutations: 1 killed, 1 killed by another")


@pytest.mark.slow
def test_who_notices_nothing_lets_a_mutation_survive(tree: Path, tmp_path: Path) -> None:
    unnoticed = replace(KILLED, before="+ 0", after="- 0", killed_by="tests/test_doubled.py::test_zero")
    copy = CopiedTree.of(tree, tmp_path)
    (copy.root / "tests/test_doubled.py").write_text(
        "from doubled import doubled\n\ndef test_zero():\n    doubled(0)\n"
    )
    subprocess.run(["git", "init", "--quiet"], cwd=copy.root, check=True)
    subprocess.run(["git", "add", "."], cwd=copy.root, check=True)
    (found,) = try_all([unnoticed], copy.root, tmp_path / "copies", tier="check", jobs=1, tell=lambda _: None)
    assert found.verdict is Verdict.SURVIVED

"""A copy of the tracked files in which a fault is put, tests are run, and the fault is taken out again."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.listed import Mutation

_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """The node ids of tests that passed and of those that did not; `is_green` if pytest was content."""

    is_green: bool
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    output: str

    def passes(self, test: str) -> bool:
        """Whether a test, each of the cases of one, or all of a file were run and passed."""
        return any(_is_case(one, test) for one in self.passed) and not any(_is_case(one, test) for one in self.failed)


def _is_case(node_id: str, test: str) -> bool:
    return node_id == test or node_id.startswith((f"{test}[", f"{test}::"))


@dataclass(frozen=True)
class CopiedTree:
    """The copy at `root`; tests there import what lies there."""

    root: Path

    @classmethod
    def of(cls, tree: Path, root: Path) -> CopiedTree:
        """A copy of what is tracked in `tree`, in which links, all of them relative, stay links."""
        listing = ["git", "ls-files", "-z"]
        tracked = subprocess.run(listing, cwd=tree, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, tracked):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, root / name, follow_symlinks=False)
        return cls(root)

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[bool]:
        """Whether the mutation applies; if it does, it is there until the end."""
        path = self.root / mutation.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        changed = mutation.mutated(text)
        if changed is None:
            yield False
            return
        _write(path, changed)
        try:
            yield True
        finally:
            _write(path, text)

    def run(self, arguments: Sequence[str], seconds: float) -> Outcome:
        """What pytest says of these arguments within so many seconds. Who goes on longer, hangs, and is not content."""
        command = [sys.executable, "-m", "pytest", "-rpfE", "--tb=line", "-p", "no:cacheprovider", *arguments]
        path, kept = os.pathsep.join([str(self.root / "src"), str(self.root)]), self.root.with_suffix(".tests")
        kept.mkdir(exist_ok=True)  # what killed tests leave behind must not meet those of others
        with subprocess.Popen(
            command,
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": path, "PYTEST_DEBUG_TEMPROOT": str(kept)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            except BaseException:  # the user ends the command
                os.killpg(process.pid, signal.SIGKILL)
                raise
        found = _OUTCOME.findall(output)
        passed = tuple(test for word, test in found if word == "PASSED")
        failed = tuple(test for word, test in found if word != "PASSED")
        return Outcome(process.returncode == 0, passed, failed, output)


def _write(path: Path, text: str) -> None:
    """With the compiled file deleted: another text of the same size within a second would be taken for the same."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

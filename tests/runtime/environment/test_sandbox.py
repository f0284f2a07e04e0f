"""Code sees no file of the user, no network and no other process where the machine has namespaces."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.runtime.environment import sandbox
from meshwright.runtime.environment.supervising import NAMESPACES
from meshwright.runtime.environment.unit_tests import sandbox_measures, unit_tests
from tests.runtime.environment.samples import sample

needs_namespaces = pytest.mark.skipif(
    NAMESPACES not in sandbox_measures(), reason="this machine has no namespaces for it"
)

KERNEL_FILES = (
    *("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/hostname"),
    *("/proc/sysrq-trigger", "/proc/irq/default_smp_affinity", "/proc/self/oom_score_adj", "/proc/self/comm"),
)


def sees(code: str, expected: object) -> bool:
    return unit_tests([sample(f"import os, socket\ndef seen():\n    {code}", f"assert seen() == {expected!r}")]) == [
        1.0
    ]


@needs_namespaces
def test_code_sees_its_working_directory_and_no_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a")
    assert sees("return os.getcwd(), os.listdir('.')", ("/of-the-response", []))
    assert sees(f"return [os.path.exists(p) for p in ({str(tmp_path)!r}, {__file__!r}, '/etc/passwd')]", [False] * 3)


@needs_namespaces
def test_code_sees_no_network_and_no_other_process() -> None:
    assert sees("return [name for _, name in socket.if_nameindex()]", ["lo"])
    for number in (1, 3):
        assert sees(f"try: open('/proc/{number}/mem', 'rb')\n    except PermissionError: return True", True)
    assert sees("return len([n for n in os.listdir('/proc') if n.isdigit()])", 3)


@needs_namespaces
def test_what_python_needs_is_read_only_and_all_files_together_are_limited() -> None:
    assert sees("return [os.access(os.path.dirname(os.__file__), mode) for mode in (os.R_OK, os.W_OK)]", [True, False])
    assert sees("v = os.statvfs('.'); return v.f_blocks * v.f_frsize <= 2**26", True)


@needs_namespaces
def test_code_of_root_too_writes_nothing_of_the_kernel_and_changes_no_device() -> None:
    """The kernel asks for the user outside, who may be root, where it guards these. Nothing is written."""
    assert sees(
        f"""
    def writes(path):
        try: os.close(os.open(path, os.O_WRONLY))
        except OSError: return False
        return True
    return [path for path in {KERNEL_FILES!r} if writes(path)]""",
        [],
    )
    assert sees(
        """
    def changes(name):
        try: os.chmod(name, os.stat(name).st_mode)
        except OSError: return False
        return True
    return [name for name in os.listdir('/dev') if changes('/dev/' + name)]""",
        [],
    )
    assert sees("return open('/dev/null', 'w').write('a'), len(open('/dev/zero', 'rb').read(1))", (1, 1))


@needs_namespaces
def test_a_python_behind_links_is_seen_by_each_of_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "python").mkdir(parents=True)
    (tmp_path / "real" / "python" / "os.py").touch()
    (tmp_path / "current").symlink_to("real")
    (tmp_path / "link").symlink_to(tmp_path / "current" / "python")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "link"))
    names = (tmp_path / "link" / "os.py", tmp_path / "real" / "python" / "os.py", Path("/bin/sh"))
    directory = tmp_path / "root"
    directory.mkdir()

    def enter() -> bool:
        sandbox.enter_root(directory)
        return all(name.exists() for name in names)

    def leave() -> bool:
        sandbox.unshare_namespaces(directory)
        return comes_true(enter)

    assert comes_true(leave)


def comes_true(work: Callable[[], bool]) -> bool:
    """In a fork of this process."""
    child = os.fork()
    if not child:
        found = False
        try:
            found = work()
        finally:
            os._exit(0 if found else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_code_has_no_privileges_and_no_variables() -> None:
    assert sees(
        "return [l.split()[1] for l in open('/proc/self/status') if l[:6] in ('CapEff', 'CapBnd')]", ["0" * 16] * 2
    )
    assert sees("return sorted(os.environ)", ["HOME", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])


def test_a_filter_is_there_where_its_library_is() -> None:
    assert sandbox.has_filter() in (True, False)
    if sandbox.has_filter():
        assert sees("import ctypes; return ctypes.CDLL(None).unshare(0)", -1)

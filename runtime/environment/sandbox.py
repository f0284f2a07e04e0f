"""Sandboxing by the Linux kernel: namespaces with a separate file system, resource limits and a system-call filter.

In its namespaces (user_namespaces(7)) code sees Python and the system's libraries, read-only, and an empty directory in
memory. It has no network, no other processes and no files of the user, and the kernel kills all of its processes when
the first one ends. System calls are made through the C library, because Python 3.11 has no functions for them.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import resource
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = 4096, 8192, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_MOUNT_ATTR_RDONLY = 1
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
_NO_CAPABILITIES = struct.pack("=IiIIIIII", 0x20080522, 0, 0, 0, 0, 0, 0, 0)
"""Argument of capset(2): version 3, this process, and three empty sets of 64 bits."""

SANDBOX_UID = 65534
"""User id inside the namespaces: that of nobody."""
_WORKING_DIRECTORY = "of-the-response"
"""A name that no directory of Python or of the system has, because those are mounted beside it."""

_DISK_SIZE = "64m"
"""Size of the file system in memory, the limit of all written files together."""
_MAX_FILES = 16384
_SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MEMORY_BYTES, _FILE_BYTES, _NUM_FILES = 2**30, 2**20, 64

_REFUSED_CALLS = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "perf_event_open", "bpf"),
    *("mount", "umount2", "pivot_root", "move_mount", "open_tree", "fsopen", "fsmount", "mount_setattr", "chroot"),
    *("unshare", "setns", "clone3", "keyctl", "add_key", "request_key", "userfaultfd", "io_uring_setup"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff"),
)

_libc = ctypes.CDLL(None, use_errno=True)


def unshare_namespaces(directory: Path) -> None:
    """Move this process into new namespaces, and its next child into a new process namespace.

    The child must call `enter_root` with the same directory. Raises OSError if the kernel or a container forbids this.
    """
    user, group = os.getuid(), os.getgid()
    _check(
        "unshare",
        _libc.unshare(
            _CLONE_NEWUSER
            | _CLONE_NEWNS
            | _CLONE_NEWPID
            | _CLONE_NEWNET
            | _CLONE_NEWIPC
            | _CLONE_NEWUTS
            | _CLONE_NEWCGROUP
        ),
    )
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{SANDBOX_UID} {user} 1"),
        ("gid_map", f"{SANDBOX_UID} {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", directory, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={_DISK_SIZE},nr_inodes={_MAX_FILES},mode=0755")


def enter_root(directory: Path) -> None:
    """Make the directory the root, with Python's files, read-only, and an empty working directory. Raises OSError."""
    for path in _visible_paths():
        _mount_read_only(path, directory)
    for name in ("proc", "tmp", _WORKING_DIRECTORY, ".old"):
        (directory / name).mkdir(exist_ok=True)
    # read-only, because a process that is root outside could write kernel settings through it
    _mount("proc", directory / "proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chdir(directory)
    pivot_root = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if pivot_root is None or _libc.syscall(pivot_root, b".", b".old"):
        _mount(directory, "/", None, _MS_MOVE)  # pivot_root(2) cannot replace an initial ramfs
        _check("chroot", _libc.chroot(b"."))
    else:
        os.chdir("/")
        _check("umount2", _libc.umount2(b"/.old", _MNT_DETACH))
    os.rmdir("/.old")
    os.chdir(f"/{_WORKING_DIRECTORY}")


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants from now on."""
    _check("prctl", _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def forbid_inspection() -> None:
    """Forbid other processes of the user from inspecting this process and those that it forks.

    Call it after `unshare_namespaces`, because from now on root owns the files of this process in /proc.
    """
    _check("prctl", _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def confine(seconds: float, *, with_filter: bool) -> None:
    """Limit this process and all that it starts, irrevocably, and drop all privileges. Raises OSError."""
    for limit, maximum in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (maximum, maximum))
    _check("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    _check("capset", _libc.capset(_NO_CAPABILITIES[:8], _NO_CAPABILITIES[8:]))
    if with_filter:
        _refuse_calls()


def has_filter() -> bool:
    """True if libseccomp and its bindings for Python are installed."""
    return _seccomp() is not None


def require_filter() -> None:
    """Load libseccomp while its files are still visible. Raises OSError if it is not installed."""
    if not has_filter():
        raise OSError(errno.ENOENT, "libseccomp's bindings are not installed")


def _seccomp() -> Any:
    """Return libseccomp's own bindings, else pyseccomp, which has the same functions; None without either."""
    for name in ("seccomp", "pyseccomp"):
        with suppress(ImportError, OSError, RuntimeError, TypeError):
            return importlib.import_module(name)
    return None


def _refuse_calls() -> None:
    seccomp = _seccomp()
    if seccomp is None:
        raise OSError(errno.ENOENT, "libseccomp's bindings")
    calls = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    for name in _REFUSED_CALLS:
        with suppress(OSError, ValueError, RuntimeError):  # a call that this architecture or library does not know
            error_number = errno.ENOSYS if name == "clone3" else errno.EPERM  # the C library then uses clone(2)
            calls.add_rule(seccomp.ERRNO(error_number), name)
    calls.load()


def _visible_paths() -> Iterator[str]:
    """Yield the paths that code sees, with the targets of links, none inside another."""
    visible = {
        *_SYSTEM_PATHS,
        sys.base_prefix,
        sys.prefix,
        sys.exec_prefix,
        *(path for path in sys.path if os.path.isdir(path)),
    }
    visible |= {os.path.realpath(path) for path in visible if os.path.lexists(path)}
    visible |= {f"/dev/{name}" for name in _DEVICES}
    for path in sorted(visible):
        parents = {str(parent) for parent in Path(path).parents}
        if os.path.exists(path) and path != "/" and not parents & visible:
            yield path


def _mount_read_only(path: str, root: Path) -> None:
    """Mount a path read-only; a link is replaced by its target, because directories on the way may be absent."""
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(path):
        target.mkdir()
    else:
        target.touch()
    _mount(path, target, None, _MS_BIND | _MS_REC)
    # devices stay writable, but their owner, root, cannot change their attributes
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    flags = ctypes.c_uint(_AT_RECURSIVE)
    result = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, attributes, size)
    _check("mount_setattr", result)


def _mount(
    source: str | Path | None, target: str | Path, filesystem: str | None, flags: int, options: str = ""
) -> None:
    texts = (os.fsencode(source) if source else None, os.fsencode(target), filesystem.encode() if filesystem else None)
    _check(f"mount {target}", _libc.mount(*texts, ctypes.c_ulong(flags), options.encode()))


def _check(action: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")

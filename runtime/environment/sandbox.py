"""What the kernel has to shut code in: namespaces with a file system of their own, limits, filters of system calls.

In namespaces (user_namespaces(7)) code sees Python and the system's libraries, read-only, and an empty directory in
memory; there are no network, no other processes and no files of the user, and the kernel ends all that was started when
the first process ends. Calls of the system go through the C library, for Python 3.11 has none of them.
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
"""For capset(2): version 3, this process, and three sets of 64 bits that are empty."""

INSIDE_USER = 65534
"""The number of the user inside, which is nobody's."""
_WORKING_DIRECTORY = "of-the-response"
"""A name that no directory of Python or of the system has, for those are shown beside it."""

_DISK = "64m"
"""What code may write, all files together."""
_MOST_FILES = 16384
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MEMORY_BYTES, _FILE_BYTES, _NUM_FILES = 2**30, 2**20, 64

_REFUSED_CALLS = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "perf_event_open", "bpf"),
    *("mount", "umount2", "pivot_root", "move_mount", "open_tree", "fsopen", "fsmount", "mount_setattr", "chroot"),
    *("unshare", "setns", "clone3", "keyctl", "add_key", "request_key", "userfaultfd", "io_uring_setup"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff"),
)

_libc = ctypes.CDLL(None, use_errno=True)


def leave(directory: Path) -> None:
    """Puts this process into namespaces of its own, and its next child, which has to call `enter` with the same
    directory, into one of processes. Raises OSError where the kernel or a container does not let it."""
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
        ("uid_map", f"{INSIDE_USER} {user} 1"),
        ("gid_map", f"{INSIDE_USER} {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", directory, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={_DISK},nr_inodes={_MOST_FILES},mode=0755")


def enter(directory: Path) -> None:
    """Makes the directory the root: what Python needs, read-only, and an empty working directory. Raises OSError."""
    for path in _shown():
        _show(path, directory)
    for name in ("proc", "tmp", _WORKING_DIRECTORY, ".old"):
        (directory / name).mkdir(exist_ok=True)
    # read-only, for the kernel lets whoever is root outside write its settings
    _mount("proc", directory / "proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chdir(directory)
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None or _libc.syscall(number, b".", b".old"):
        _mount(directory, "/", None, _MS_MOVE)  # a root in memory cannot be exchanged
        _check("chroot", _libc.chroot(b"."))
    else:
        os.chdir("/")
        _check("umount2", _libc.umount2(b"/.old", _MNT_DETACH))
    os.rmdir("/.old")
    os.chdir(f"/{_WORKING_DIRECTORY}")


def adopt() -> None:
    """From now on what descends from this process and loses its parent is a child of this one."""
    _check("prctl", _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def close_to_others() -> None:
    """No other process of the user may look into this one, nor into those that it forks. To be called behind `leave`,
    for from now on this process's files in /proc are root's."""
    _check("prctl", _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def confine(seconds: float, *, with_filter: bool) -> None:
    """Limits this process and all that it starts, for good, and takes every privilege from it. Raises OSError."""
    for limit, most in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    _check("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    _check("capset", _libc.capset(_NO_CAPABILITIES[:8], _NO_CAPABILITIES[8:]))
    if with_filter:
        _refuse_calls()


def has_filter() -> bool:
    """Whether libseccomp and its bindings for Python are installed."""
    return _seccomp() is not None


def require_filter() -> None:
    """Loads the library while its files can be seen. Raises OSError where there is none."""
    if not has_filter():
        raise OSError(errno.ENOENT, "libseccomp's bindings are not installed")


def _seccomp() -> Any:
    """libseccomp's own bindings, else pyseccomp, which has the same functions; None without either."""
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
        with suppress(OSError, ValueError, RuntimeError):  # a call that this processor or library does not know
            answer = errno.ENOSYS if name == "clone3" else errno.EPERM  # the C library then uses clone(2)
            calls.add_rule(seccomp.ERRNO(answer), name)
    calls.load()


def _shown() -> Iterator[str]:
    """Paths that code sees, none inside another, and what they are links to."""
    wanted = {
        *_SYSTEM,
        sys.base_prefix,
        sys.prefix,
        sys.exec_prefix,
        *(path for path in sys.path if os.path.isdir(path)),
    }
    wanted |= {os.path.realpath(path) for path in wanted if os.path.lexists(path)}
    wanted |= {f"/dev/{name}" for name in _DEVICES}
    for path in sorted(wanted):
        around = {str(each) for each in Path(path).parents}
        if os.path.exists(path) and path != "/" and not around & wanted:
            yield path


def _show(path: str, root: Path) -> None:
    """Read-only. A link is shown as what it leads to, for what lies on its way is not."""
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(path):
        place.mkdir()
    else:
        place.touch()
    _mount(path, place, None, _MS_BIND | _MS_REC)
    # a device is still written to, but its owner, who is root, cannot change it for others
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    flags = ctypes.c_uint(_AT_RECURSIVE)
    call = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(place), flags, attributes, size)
    _check("mount_setattr", call)


def _mount(source: str | Path | None, place: str | Path, kind: str | None, flags: int, options: str = "") -> None:
    texts = (os.fsencode(source) if source else None, os.fsencode(place), kind.encode() if kind else None)
    _check(f"mount {place}", _libc.mount(*texts, ctypes.c_ulong(flags), options.encode()))


def _check(what: str, answer: int) -> None:
    if answer:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")

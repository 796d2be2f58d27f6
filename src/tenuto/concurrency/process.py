"""Whether the process that owns something still lives, as far as this host can tell.

Process ids are only compared within one boot and one pid namespace, and a pid alone names nobody: it is used again. So
an owner says boot, namespace, pid and start time. A killed child that nobody has reaped keeps its pid and start time as
a zombie, and is dead all the same.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
from pathlib import Path
from typing import Final, Literal

from tenuto.model.records import Owner
from tenuto.record import record

LivenessVerdict = Literal["dead", "alive", "unknown"]

_LINUX: Final = sys.platform == "linux"
_STAT: Final = "/proc/{pid}/stat"
_FIRST_TIME_NAMESPACE: Final = "time:[4026531834]"
"""The one that a machine boots with, the same on all."""
_DEAD_STATES: Final = frozenset("ZXx")
_STOPPED_STATES: Final = frozenset("Tt")


@record
class _Process:
    started: str
    zombie: bool
    stopped: bool = False


_own: Final[dict[int, Owner]] = {}
"""This process, once the system has told all of it. A forked child forgets it: pids are used again."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_own.clear)


def this_process() -> Owner:
    """Returns the identity of this process."""
    pid = os.getpid()
    if (known := _own.get(pid)) is not None:
        return known
    found = _inspect(pid)
    own = Owner(
        host=socket.gethostname(),
        boot=_boot(),
        pid_namespace=_pid_namespace(),
        pid=pid,
        started=found.started if found else "",
        user=_user(),
    )
    if own.boot and own.pid_namespace and own.started:
        _own[pid] = own
    return own


@record
class Observation:
    """What this host can tell of a process: see `judge`; `stopped`: alive, and stopped by SIGSTOP or a debugger."""

    verdict: LivenessVerdict
    stopped: bool = False


def judge(owner: Owner) -> LivenessVerdict:
    """Returns dead or alive if this host can tell, else unknown: then the lease has to be watched."""
    return observe(owner, this_process()).verdict


def observe(owner: Owner, own: Owner) -> Observation:
    """Looks at the process of `owner`; `own` is `this_process()`, read once by who looks at many."""
    if not owner.boot or not owner.pid_namespace or not owner.started:
        return Observation("unknown")
    if (owner.boot, owner.pid_namespace, owner.host) != (own.boot, own.pid_namespace, own.host):
        return Observation("unknown")
    if (owner.pid, owner.started) == (own.pid, own.started):
        return Observation("alive")  # ranks that are threads of one process are many
    found = _inspect(owner.pid)
    if found is None:
        # A /proc that hides other users' processes looks the same as one without the process.
        return Observation("unknown" if _answers(owner.pid) else "dead")
    if found.zombie or found.started != owner.started:
        return Observation("dead")
    return Observation("alive", found.stopped)


def _inspect(pid: int) -> _Process | None:
    if pid <= 0:
        return None
    return _inspect_proc(pid) if _LINUX else _inspect_by_psutil(pid)


def _inspect_proc(pid: int) -> _Process | None:
    try:
        text = Path(_STAT.format(pid=pid)).read_text("ascii", "replace")
    except OSError:  # gone, hidden, or this process has no file left to open: then nothing is known of the other
        return None
    # The second field is the program's name in brackets, and may hold anything, brackets and spaces too.
    fields = text.rpartition(")")[2].split()
    state = fields[0]
    return _Process(started=fields[19], zombie=state in _DEAD_STATES, stopped=state in _STOPPED_STATES)


def _inspect_by_psutil(pid: int) -> _Process | None:
    import psutil  # type: ignore[import-untyped]  # Linux says it all in /proc

    try:
        process = psutil.Process(pid)
        state = process.status()
        stopped = state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return _Process(repr(process.create_time()), state == psutil.STATUS_ZOMBIE, stopped)
    except psutil.ZombieProcess:
        return _Process("", zombie=True)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _answers(pid: int) -> bool:
    """Returns whether some process has this pid; signal 0 only asks."""
    if not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot() -> str:
    if not _LINUX:
        import psutil

        return repr(psutil.boot_time())
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    if not _LINUX:
        return "host"
    try:
        # A process in a namespace of its own may still have the /proc of another one: there, pids are not its own.
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return os.readlink("/proc/self/ns/pid") + _time_namespace()
    except OSError:
        return ""


def _time_namespace() -> str:
    """Returns the time namespace, by whose clock start times are told; empty for the usual one."""
    try:
        found = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel that has none
        return ""
    return "" if found == _FIRST_TIME_NAMESPACE else f" {found}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())

"""Slots: files in shared memory that outlive their process, each handed to one holder.

`<root>/tenuto-<uid>/<repository>/<run>/<rank>-<slot>` is the file, `<rank>of<ranks>-<slot>` where several ranks keep
states on their nodes; the same name with `.lock` is its lock. A POSIX record lock keeps other processes out. Inside one
process it is no use (a second lock is granted, and closing any descriptor of the file drops the first: measured), so
one table per process knows what it has locked, opens a slot's lock once, and closes it only after it has removed the
file. flock would be inherited by forked loader workers and outlive a killed trainer (measured).

What other users have there is read where this process may (root), and never locked, changed or resumed from.

A file that is sealed has a complete image, which a later process may resume from: it is not stale, and no new file
replaces it before `discard`.

Everything here raises OSError; the caller then does without a slot, and reports why.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tenuto.errors import CorruptionError
from tenuto.model import canonical_json
from tenuto.record import record

# --------------------------------------------------------------------------------------------------
# The seal of an image's file: two blocks of 4096 bytes at its very end, of which the newer undamaged one counts.
#
# `memory_tier/seal` knows the content of a block; here it is a sealed line of canonical JSON behind a mark. A file is
# unsealed by zeroing both blocks before anything else in it is touched, and sealed by writing one of them last: a
# process that is killed anywhere in between leaves an unsealed file.

BLOCK: Final = 4096
BLOCKS: Final = 2
ROOM: Final = BLOCK * BLOCKS
"""Bytes at the end of a file that belong to its seal."""
_MARK: Final = b"tenuto memory 1\n"
_HEAD: Final = len(_MARK) + 4
MAX_PAYLOAD: Final = BLOCK - _HEAD


def write_seal(descriptor: int, number: int, payload: bytes) -> None:
    """Writes block `number` (0 or 1); the other one stays."""
    assert len(payload) <= MAX_PAYLOAD
    block = _MARK + len(payload).to_bytes(4, "little") + payload
    write_at(descriptor, block.ljust(BLOCK, b"\0"), _begin(descriptor) + number * BLOCK)


def clear_seal(descriptor: int) -> None:
    """Marks the file as unsealed."""
    write_at(descriptor, bytes(ROOM), _begin(descriptor))


def read_seals(descriptor: int) -> list[tuple[int, bytes]]:
    """Returns number and payload of each block whose own digest is right; the payload is not interpreted."""
    begin = _begin(descriptor)
    if begin < 0:
        return []
    found = []
    for number in range(BLOCKS):
        block = os.pread(descriptor, BLOCK, begin + number * BLOCK)
        length = int.from_bytes(block[len(_MARK) : _HEAD], "little")
        if len(block) != BLOCK or not block.startswith(_MARK) or length > MAX_PAYLOAD:
            continue
        payload = block[_HEAD : _HEAD + length]
        try:
            canonical_json.check_seal(payload, name="seal")
        except CorruptionError:
            continue
        found.append((number, payload))
    return found


def is_sealed(descriptor: int) -> bool:
    """Returns whether the file is marked as a complete image."""
    return bool(read_seals(descriptor))


def _begin(descriptor: int) -> int:
    return os.fstat(descriptor).st_size - ROOM


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


SHARED_MEMORY: Final = "/dev/shm"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How a file is opened that may be anything: a fifo is not waited for."""
_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME: Final = r"([0-9]+)(?:of([0-9]+))?-([0-9]+)"
_SLOT: Final = re.compile(_NAME, re.ASCII)
_STALE: Final = re.compile(rf"{_NAME}\.stale-[0-9]+", re.ASCII)
_LOCK: Final = ".lock"
_PLACE: Final = re.compile(r"tenuto-(0|[1-9][0-9]{0,9})", re.ASCII)
_FLOCK: Final = "hhqqi0q"
"""`struct flock`, in this machine's own layout: type, whence, start, length, pid."""
_PATIENCE_S: Final = 0.2
"""A starting process locks a dead owner's slot for the time of one rename: that is waited out."""


@record
class Slot:
    """`parent` is `<repository>/<run>` below a user's directory in `root`; `name` is as `slot_name` makes it. `user`:
    another user than this process's own, whose slots are only read."""

    root: str
    parent: str
    name: str
    user: int | None = None


@record
class OtherUsers:
    """The other users with a directory in shared memory.

    users: those whose directory this process may read; closed: how many others there are. refused: in words, what is
    called like a user's directory, this process's own among them, and is not one.
    """

    users: tuple[int, ...] = ()
    closed: int = 0
    refused: tuple[str, ...] = ()


def slot_name(rank: int, number: int, of: int = 1) -> str:
    """Returns the name of slot `number` of one rank, of a job of `of` ranks."""
    return f"{rank}-{number}" if of == 1 else f"{rank}of{of}-{number}"


def parse_name(name: str) -> tuple[int, int, int]:
    """Returns rank, slot, and number of ranks. ValueError for what is no slot's name."""
    found = _SLOT.fullmatch(name)
    if found is None:
        raise ValueError(name)
    rank, of, number = found.groups()
    return int(rank), int(number), int(of or 1)


class SlotTable:
    """The slots that this process has locked. One per process: a forked child starts with an empty one."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may run in here, and give back the slot of an arena that nobody refers to.
        self._guard = threading.RLock()
        self._locks: dict[Slot, int] = {}
        self._held: set[Slot] = set()
        self._files: dict[Slot, tuple[int, int]] = {}

    def take(self, slot: Slot) -> None:
        """Locks a slot against all other processes and threads. BlockingIOError if another has locked it."""
        if slot.user is not None:
            raise PermissionError(errno.EPERM, f"the slot is user {slot.user}'s")
        with self._guard:
            if slot in self._held:
                raise BlockingIOError(errno.EAGAIN, "another arena of this process holds the slot")
            os.stat(slot.root)  # without shared memory there is nothing to wait for
            until = time.monotonic() + _PATIENCE_S
            while not self._lock(slot):
                if time.monotonic() > until:
                    raise BlockingIOError(errno.EAGAIN, "another process holds the slot")
                time.sleep(_PATIENCE_S / 20)
            self._held.add(slot)

    def give_back(self, slot: Slot) -> None:
        with self._guard:
            self._held.discard(slot)
            self._unlock(slot)

    def holder(self, slot: Slot) -> int | None:
        """Returns the pid of the process that has locked a slot, 0 where it is in another pid namespace; None if none
        has. Creates and locks nothing. The guard keeps this process's own locks: closing their file would drop them."""
        with self._guard:
            if slot in self._held:
                return os.getpid()
            until = time.monotonic() + (_PATIENCE_S if slot.user is None else 0)
            while (found := _lock_holder(slot)) is not None and time.monotonic() < until:
                time.sleep(_PATIENCE_S / 20)
            return found

    def create(self, slot: Slot) -> int:
        """Creates an empty file for a slot that the caller has locked; returns a descriptor for reading and writing.
        FileExistsError where a sealed image lies there."""
        with directory(slot.root, slot.parent) as parent:
            if _is_sealed_file(slot.name, parent):
                raise FileExistsError(errno.EEXIST, "a sealed image lies there; see `tenuto ls --memory`")
            _unlink(slot.name, parent)
            descriptor = os.open(slot.name, _FILE | os.O_EXCL, 0o600, dir_fd=parent)
        self._files[slot] = _identity(os.fstat(descriptor))
        return descriptor

    def open_file(self, slot: Slot) -> int:
        """Opens the file of a slot which the caller has locked, as if it had been created now. FileNotFoundError if
        there is none."""
        with directory(slot.root, slot.parent) as parent:
            descriptor = os.open(slot.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            known = self._files.setdefault(slot, _identity(os.fstat(descriptor)))
            if known != _identity(os.fstat(descriptor)):
                raise FileNotFoundError(errno.ENOENT, "the image's file was removed by someone else")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def discard(self, slot: Slot) -> None:
        """Removes whatever file lies in a slot which the caller has locked, a sealed one too."""
        self._files.pop(slot, None)
        try:
            with directory(slot.root, slot.parent) as parent:
                _unlink(slot.name, parent)
        except FileNotFoundError:
            pass  # it is gone already

    def leave(self, slot: Slot) -> None:
        """Unlocks a slot and leaves its file to a later process."""
        self._files.pop(slot, None)
        self.give_back(slot)

    def remove(self, slot: Slot) -> None:
        """Removes the file that was created for a slot which the caller has locked, and no other of that name: a
        session manager may have cleared /dev/shm meanwhile, and another process begun anew there."""
        created = self._files.pop(slot, None)
        try:
            with directory(slot.root, slot.parent) as parent:
                if _identity(os.stat(slot.name, dir_fd=parent, follow_symlinks=False)) == created:
                    os.unlink(slot.name, dir_fd=parent)
        except FileNotFoundError:
            pass  # it is gone already

    def free_stale(self, root: str, repository: str | None = None) -> None:
        """Removes this user's files whose owners are dead, except those that are sealed. `repository`: looks at no
        other directory than this one's."""
        for path, names in walk(root, repository=repository):
            for name in sorted({name.removesuffix(_LOCK) for name in names}):
                if _SLOT.fullmatch(name):
                    self._set_aside(Slot(root, path, name))
            try:
                with directory(root, path) as parent:
                    for name in os.listdir(parent):
                        if _STALE.fullmatch(name):
                            _unlink(name, parent)
            except FileNotFoundError:
                pass  # the directory was removed since it was listed
            _prune(root, path)

    def _set_aside(self, slot: Slot) -> None:
        """Renames a dead owner's file, so that its lock is needed for a moment only: freeing many pages takes long."""
        with self._guard:
            if slot in self._held or not self._lock(slot):
                return
            try:
                with directory(slot.root, slot.parent) as parent:
                    if _is_sealed_file(slot.name, parent):
                        return
                    os.rename(slot.name, f"{slot.name}.stale-{os.getpid()}", src_dir_fd=parent, dst_dir_fd=parent)
            except FileNotFoundError:
                pass  # freed by another process that is starting too, or only its lock was left
            finally:
                self._unlock(slot)

    def _lock(self, slot: Slot) -> bool:
        """Locks a slot, if no other process has."""
        try:
            with directory(slot.root, slot.parent, create=True) as parent:
                descriptor = os.open(slot.name + _LOCK, _FILE, 0o600, dir_fd=parent)
        except FileNotFoundError:
            return False  # the directory's last user removed it between our making it and our opening in it
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return False
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return False  # its last owner removed it before it was ours: a lock on no name excludes nothing
        self._locks[slot] = descriptor
        return True

    def _unlock(self, slot: Slot) -> None:
        """Removes the lock's file while it is still locked, then gives it up by closing it."""
        descriptor = self._locks.pop(slot)
        own = _identity(os.fstat(descriptor))
        try:
            with directory(slot.root, slot.parent) as parent:
                if _identity(os.stat(slot.name + _LOCK, dir_fd=parent, follow_symlinks=False)) == own:
                    os.unlink(slot.name + _LOCK, dir_fd=parent)
        except FileNotFoundError:
            pass  # cleared away by someone else
        finally:
            os.close(descriptor)
        _prune(slot.root, slot.parent)


def other_users(root: str) -> OtherUsers:
    """Finds the other users with a directory there."""
    try:
        found = sorted(int(match[1]) for match in map(_PLACE.fullmatch, os.listdir(root)) if match)
    except OSError:
        return OtherUsers()
    users: list[int] = []
    refused: list[str] = []
    closed = 0
    for user in found:
        place = f"{root}/tenuto-{user}"
        try:
            status = os.stat(place, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode) or not _is_private(status, user):
                refused.append(f"{place} is passed over: it is not a directory, another user's, or open to others")
            elif user != os.geteuid():
                with directory(root, user=user):
                    users.append(user)
        except FileNotFoundError:
            pass  # gone since it was listed
        except OSError:
            closed += 1
    return OtherUsers(tuple(users), closed, tuple(refused))


@contextmanager
def directory(root: str, below: str = "", *, create: bool = False, user: int | None = None) -> Iterator[int]:
    """A descriptor of this user's directory in shared memory, or of one below it, every step checked to be our own; of
    another `user`'s, to be theirs.

    /dev/shm is everybody's: a link, or a directory that someone else laid there, is refused.
    """
    owner = os.geteuid() if user is None else user
    descriptor = os.open(root, _DIRECTORY)
    try:
        for name in [f"tenuto-{owner}", *filter(None, below.split("/"))]:
            if create:
                _make(name, descriptor)
            inner = _open_own(name, descriptor, root)
            os.close(descriptor)
            descriptor = inner
            if not _is_private(os.fstat(descriptor), owner):
                raise PermissionError(errno.EPERM, f"{root}/…/{name} belongs to another user or is open to others")
        yield descriptor
    finally:
        os.close(descriptor)


def _is_private(status: os.stat_result, user: int) -> bool:
    return status.st_uid == user and not stat.S_IMODE(status.st_mode) & 0o077


def _open_own(name: str, above: int, root: str) -> int:
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.ENOTDIR, errno.ELOOP):
            raise
        message = f"{root}/…/{name} is not a directory of this user's ({error.strerror})"
        raise PermissionError(errno.EPERM, message) from error


def _prune(root: str, path: str) -> None:
    """Removes `<repository>/<run>` where nothing is left in it, then the repository's directory."""
    repository, run = path.split("/")
    for above, name in ((repository, run), ("", repository)):
        try:
            with directory(root, above) as parent:
                os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EPERM):
                raise
            return


def _is_sealed_file(name: str, parent: int) -> bool:
    try:
        descriptor = os.open(name, READ, dir_fd=parent)
    except OSError:
        return False  # none, or none of ours
    try:
        return is_sealed(descriptor)
    finally:
        os.close(descriptor)


def _lock_holder(slot: Slot) -> int | None:
    try:
        with directory(slot.root, slot.parent, user=slot.user) as parent:
            descriptor = os.open(slot.name + _LOCK, READ, dir_fd=parent)
    except FileNotFoundError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def occupied(root: str, user: int | None = None, repository: str | None = None) -> Iterator[Slot]:
    """Yields every slot of this user, or of another `user`, that has a file, locked or not: of all repositories, or of
    one."""
    for path, names in walk(root, user, repository):
        for name in names:
            if _SLOT.fullmatch(name):
                yield Slot(root, path, name, user)


def walk(root: str, user: int | None = None, repository: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yields `<repository>/<run>` and the names in it, of all that this user, or `user`, has in shared memory, or of
    one repository."""
    for one in _names(root, "", user) if repository is None else [repository]:
        for run in _names(root, one, user):
            yield f"{one}/{run}", _names(root, f"{one}/{run}", user)


def _names(root: str, below: str, user: int | None) -> list[str]:
    """Lists a directory; nothing if it is not the user's own, which `take` reports."""
    try:
        with directory(root, below, user=user) as descriptor:
            return sorted(os.listdir(descriptor))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _make(name: str, parent: int) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass  # ours or not: checked once it is open


def _unlink(name: str, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass  # it is gone already

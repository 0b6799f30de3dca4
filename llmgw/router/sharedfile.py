"""Files that the processes of one server map together: where they are, how they come and how they go.

They belong in memory: on a disk, the kernel's writeback would now and then stop a worker that writes to a page. Their folder
is one that anybody may write to, so a link is never followed and a file of another user never mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from llmgw.errors import LlmgwError

ROOM = 64 * 2**20


class Absent(LlmgwError):
    """There is no such file at this path, or it is of another kind."""


def shared_file(state: Path, name: str) -> Path:
    """Where a file shared by the processes of the server with this C{state} folder is, or belongs if there is none yet.

    In memory, unless there is little room: a page that cannot be had when it is first written to ends the process (SIGBUS).
    """
    shm = Path("/dev/shm")
    digest = hashlib.sha256(os.fsencode(state.resolve())).hexdigest()[:16]
    here, there = shm / f"llmgw-{os.getuid()}-{digest}-{name}", state / name
    if here.exists() or not os.access(shm, os.W_OK):
        return here if here.exists() else there
    room = os.statvfs(shm)
    return there if there.exists() or room.f_bavail * room.f_frsize < ROOM else here


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock on a file, so that nobody takes it away who holds the same lock; false if there is no file."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            yield False
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                    yield True
                    return
        finally:
            os.close(descriptor)


def started(pid: int) -> int:
    """When C{pid} started, in clock ticks since boot; 0 if there is no such process or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def open_file(path: Path) -> int:
    """A descriptor of the file at this path.

    @raise Absent: there is none that we may open.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise Absent(f"{path}: cannot be opened: {error.strerror}") from None


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map C{size} bytes of C{path}, which must be ours and of that size.

    @raise Absent: it is not.
    """
    descriptor = open_file(path)
    try:
        return map_open(descriptor, path, size)
    finally:
        os.close(descriptor)


def map_open(descriptor: int, path: Path, size: int) -> mmap.mmap:
    """The same of a file that is open already, and may have lost its C{path} since."""
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or status.st_size != size:
        raise Absent(f"{path}: has {status.st_size} bytes, not {size}, or is not ours")
    return mmap.mmap(descriptor, size)


def new_file(path: Path, size: int, first: bytes) -> None:
    """Put a file of C{size} zero bytes that begins with C{first} in place of C{path}, readable by us only."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, first, 0)
    finally:
        os.close(descriptor)
    os.rename(scratch, path)

"""The store's files as the system sees them: who writes them, and whether they are still those that were opened."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NoReturn

from agl_core.errors import StoreError

_LOCKED_BYTE = 1 << 62
"""Far behind the bytes that SQLite locks, and behind the end of any file."""
_FLOCK = struct.Struct("hhqqi")
"""Linux's `struct flock`: type, whence, start, length, process."""
_LOG_HEADER = 32
_FRAME_HEADER = 24
"""Of a write-ahead log: it begins with a header, and each of its frames is a header and a page."""


def log_of(path: Path) -> Path:
    """The write-ahead log: it is there while a process writes, and after a crash."""
    return path.with_name(path.name + "-wal")


class WriterLock:
    """Held by the one process that writes; the system releases it however that process ends.

    It is a lock of one byte of the store's own file. So it holds under every name of the file, and there is no lock
    file to be removed, left behind, or made by another program.

    Such a lock belongs to the process: forked children do not inherit it, and closing any handle of the file in this
    process ends it, as SQLite does with its last connection. So take it once SQLite holds the file in WAL mode, and
    release it after SQLite's last connection is closed.
    """

    _held: ClassVar[set[tuple[int, int, int]]] = set()
    """Process, device and inode: the system does not keep two writers of one process apart."""

    def __init__(self, store: Path) -> None:
        self._key = _key(store)
        if self._key in self._held:
            raise _taken(store, os.getpid())
        try:
            self._handle = os.open(store, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError as error:
            raise StoreError(
                f"The store {store} cannot be opened for writing ({error.strerror}). Check the permissions of the file "
                f"and its folder."
            ) from error
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKED_BYTE)
        except OSError:
            holder = _holder(self._handle)
            os.close(self._handle)
            raise _taken(store, holder) from None
        self._held.add(self._key)

    def release(self) -> None:
        self._held.discard(self._key)
        os.close(self._handle)


def is_written(store: Path) -> bool:
    """Whether another process writes the store now. On Linux no lock is taken for the answer."""
    if not log_of(store).exists():
        return False
    try:
        handle = _kept_handle(store)
    except OSError:
        return False
    holder = _holder(handle)
    if holder is not None:
        return holder > 0
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _LOCKED_BYTE)
    except OSError:
        return True
    fcntl.lockf(handle, fcntl.LOCK_UN, 1, _LOCKED_BYTE)
    return False


_handles: dict[tuple[int, int, int], int] = {}
"""By process, device and inode: handles to look at the lock with. They stay open: closing one would end the locks by
which SQLite holds the file for the readers of this process."""
_handles_guard = threading.Lock()


def _kept_handle(store: Path) -> int:
    with _handles_guard:
        key = _key(store)
        if key not in _handles:
            _handles[key] = os.open(store, os.O_RDONLY | os.O_CLOEXEC)
        return _handles[key]


def _key(store: Path) -> tuple[int, int, int]:
    status = store.stat()
    return os.getpid(), status.st_dev, status.st_ino


def _holder(handle: int) -> int | None:
    """The other process that has the lock, 0 without one; None where the system does not say."""
    if sys.platform != "linux":
        return None
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _LOCKED_BYTE, 1, 0)
    kind, *_, process = _FLOCK.unpack_from(fcntl.fcntl(handle, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else int(process)


def _taken(store: Path, process: int | None) -> StoreError:
    holder = f" (process {process})" if process else ""
    return StoreError(
        f"The store {store} is being written by another process{holder}, and takes one writer at a time. Wait until "
        f"it ends, stop it, or use another folder; to look only, open it read-only."
    )


class OpenFiles:
    """The files that the writer has open, and whether their names still lead to them, with all that was written.

    A process goes on writing to files that were removed, moved or cut off, without an error: what it then
    acknowledges is lost with its end. Make one once SQLite has opened its files.
    """

    def __init__(self, store: Path, page_size: int) -> None:
        self._store, self._log = str(store), str(log_of(store))
        self._frame = _FRAME_HEADER + page_size
        opened = {file: os.stat(file) for file in (self._store, self._log, f"{store}-shm")}
        self._opened = [(file, status.st_dev, status.st_ino) for file, status in opened.items()]
        self._store_size, self._log_size = opened[self._store].st_size, opened[self._log].st_size
        self._log_handle = os.open(self._log, os.O_RDONLY | os.O_CLOEXEC)
        self._lost: str | None = None

    def check(self) -> None:
        """Raise StoreError unless their names lead to the files that were opened. For any thread.

        Once this, or `check_all`, has raised it, it always does.
        """
        self._sizes()

    def check_all(self, log_is_empty: Callable[[], bool]) -> None:
        """`check`, and raise StoreError unless all that was written is in them. For the writer's thread.

        `log_is_empty` asks SQLite, where the log is: another program may have folded all of it into the store.
        """
        store_size, log_size = self._sizes()
        if store_size < self._store_size:
            self._lose(f"its file {self._store} was cut off, from {self._store_size} to {store_size} bytes.")
        if log_size < self._log_size and (log_size or not log_is_empty()):
            self._lose(f"its file {self._log} was cut off, from {self._log_size} to {log_size} bytes.")
        if log_size >= self._log_size and self._has_a_gap():
            self._lose(f"its file {self._log} was cut off while it was written.")
        self._store_size, self._log_size = store_size, log_size

    def were_cut(self) -> None:
        """Take the sizes that the files have now: SQLite cut off what it did not need. StoreError as of `check`."""
        self._store_size, self._log_size = self._sizes()

    def close(self) -> None:
        os.close(self._log_handle)

    def _sizes(self) -> tuple[int, int]:
        """Bytes of store and log; StoreError unless all names lead to the files that were opened."""
        if self._lost:
            self._lose(self._lost)
        sizes = []
        for file, device, inode in self._opened:
            try:
                status = os.stat(file)
            except OSError as error:
                self._lose(f"its file {file} was removed or moved ({error.strerror}).")
            if (status.st_dev, status.st_ino) != (device, inode):
                self._lose(f"another file was put in the place of {file}.")
            sizes.append(status.st_size)
        return sizes[0], sizes[1]

    def _has_a_gap(self) -> bool:
        """Whether zeros are where a frame was: the log was cut off, and then written on behind its end."""
        frames = (self._log_size - _LOG_HEADER) // self._frame
        last = _LOG_HEADER + (frames - 1) * self._frame
        return frames > 0 and not all(any(os.pread(self._log_handle, 4, start)) for start in (0, last))

    def _lose(self, why: str) -> NoReturn:
        self._lost = why
        raise StoreError(
            f"The store {self._store} can no longer be written: {why} Nothing is recorded any more, and no call is "
            f"answered. Stop this process, put the file back or restore a backup of the store, then start it again."
        )

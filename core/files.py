"""Files, read within bounds and written so that they are whole or not there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gzip
import hashlib
import io
import os
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from jetfire.core.errors import UsageError

MIB = 1 << 20
_PART = ".part"
# A part that was not written to for so long has lost its writer.
ABANDONED_S = 3600.0


class Unreadable(UsageError):
    """A file that cannot be used; `reason` says why without naming the file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class Missing(Unreadable):
    """A file that does not exist."""


class Unwritable(UsageError):
    """A file or folder that cannot be written; its content is as before."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: cannot be written: {error.strerror or error}")
        self.path = path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise Unwritable where the system refuses to write a file or folder."""
    try:
        yield
    except OSError as error:
        raise Unwritable(path, error) from None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise Missing or Unreadable where the system refuses to read a file, or it is damaged."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Missing(path, str(error.strerror)) from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise Unreadable(path, getattr(error, "strerror", None) or str(error)) from None


class Busy(UsageError):
    """A lock file that another process holds."""


def read(path: Path, most: int) -> bytes:
    """Return the content of a regular file; one whose name ends in ``.gz`` is unpacked.

    A pipe is read only where the shell made it (``/dev/stdin``, ``/dev/fd/63``). Another might
    never end, or never begin.

    Args:
        path: the file.
        most: bytes that it may hold, packed and unpacked.

    Raises:
        Missing: there is no such file.
        Unreadable: it is no regular file, is too large, or cannot be read or unpacked.
    """
    with _reading(path):
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISFIFO(mode) and _descriptor(path) is not None:
                os.set_blocking(file.fileno(), True)
            elif not stat.S_ISREG(mode):
                raise Unreadable(path, "no regular file")
            data = file.read(most + 1)
        if path.suffix == ".gz" and len(data) <= most:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(most + 1)
    if len(data) > most:
        raise Unreadable(path, f"more than {most} bytes: expected at most that many")
    return data


def _descriptor(path: Path) -> int | None:
    """Return the process's own file descriptor that a name such as ``/dev/stdout`` stands for."""
    name = os.path.normpath(path.absolute())
    streams = ("/dev/stdin", "/dev/stdout", "/dev/stderr")
    if name in streams:
        return streams.index(name)
    found = re.fullmatch(r"(?:/dev|/proc/self)/fd/([0-9]{1,9})", name)
    return int(found[1]) if found else None


def _open_at_once(name: str, flags: int) -> int:
    """Return a file's descriptor, without waiting for a pipe's other end."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def opened(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        Missing: there is no such file.
        Unreadable: it is no regular file, or may not be read.
    """
    with _reading(path):
        handle = _open_at_once(os.fspath(path), os.O_RDONLY)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unreadable(path, "no regular file")
    return os.fdopen(handle, "rb")


def digest(path: Path, see: Callable[[memoryview], None] | None = None) -> str:
    """Return the SHA-256 of a regular file, as 64 hexadecimal digits.

    Args:
        path: the file.
        see: is called with the content, in blocks of 1 MiB and the rest.

    Raises:
        Missing: there is no such file.
        Unreadable: it is no regular file, or cannot be read.
    """
    total, block = hashlib.sha256(), bytearray(MIB)
    with _reading(path), opened(path) as file:
        while count := file.readinto(block):  # type: ignore[attr-defined]
            part = memoryview(block)[:count]
            total.update(part)
            if see is not None:
                see(part)
    return total.hexdigest()


def write(path: Path, content: bytes | str, *, alone: bool = False, folders: bool = False) -> None:
    """Replace a file by one that is whole and on the disk; text is written as UTF-8.

    The content goes to another file in the same folder first, so a link is replaced and not
    followed. A device or a pipe is written to directly. So is a file that the process has open
    under a name such as ``/dev/stdout``, from its current position.

    Args:
        path: the file.
        content: the whole content.
        alone: the caller keeps other writers of this file away. Any part found is then that of a
            dead writer, and is removed.
        folders: make the folders of the path.

    Raises:
        Unwritable: a full disk, a missing folder, a lack of rights.
    """
    data = content.encode() if isinstance(content, str) else content
    with writing(path):
        if (own := _descriptor(path)) is not None:
            with open(own, "wb", closefd=False) as out:
                out.write(data)
            return
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
    with new_file(path, alone=alone, folders=folders) as out:
        out.write(data)


def is_stream(path: Path) -> bool:
    """Return whether each `write` adds to what is there, as to a pipe, rather than replaces it."""
    return _descriptor(path) is not None or (path.exists() and not path.is_file())


@contextlib.contextmanager
def new_file(path: Path, *, alone: bool = False, folders: bool = False) -> Iterator[IO[bytes]]:
    """Give a file to write, which then takes the place of `path`, whole and on the disk.

    Where the block raises, or the process dies in it, `path` is as before.

    Args:
        path: the file.
        alone, folders: as in `write`.

    Raises:
        Unwritable: a full disk, a missing folder, a lack of rights.
    """
    with writing(path):
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        tidy(path.parent, path.name, 0.0 if alone else ABANDONED_S)
        handle, name = tempfile.mkstemp(_PART, _prefix(path.name), path.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                yield out
                out.flush()
                os.fchmod(out.fileno(), _mode(path))
                os.fsync(out.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # an interrupt may follow the renaming
                os.unlink(name)
            raise
        sync(path.parent)


def _mode(path: Path) -> int:
    """Return the permissions of the file that is replaced, or those of a new one."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


@contextlib.contextmanager
def new_folder(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """Give a folder to fill, which then takes the place of `path`, whole and on the disk.

    Processes that have mapped files of the old folder keep them. Where the block raises, or the
    process dies in it, `path` is as before.

    Args:
        path: the folder.
        alone: as in `write`.

    Raises:
        Unwritable: a full disk, a lack of rights.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tidy(path.parent, path.name, 0.0 if alone else ABANDONED_S)
        with tempfile.TemporaryDirectory(_PART, _prefix(path.name), path.parent) as name:
            part = Path(name) / "new"
            part.mkdir()
            yield part
            for file in part.rglob("*"):
                sync(file)
            sync(part)
            _replace_folder(part, path)
            sync(path.parent)


def _replace_folder(new: Path, path: Path) -> None:
    """Replace a folder by another, in one step where the system can.

    The old folder is left at the new one's old place, or beside it.
    """
    if not os.path.lexists(path):
        new.rename(path)
    elif not _exchanged(new, path):
        old = new.with_name("old")
        path.rename(old)
        try:
            new.rename(path)
        except OSError:
            old.rename(path)
            raise


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names in one step, as Linux can, and return whether that was done."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(here, names[0], here, names[1], exchange) == 0


def _put_back(path: Path) -> None:
    """Undo a replacement that was interrupted, where the system cannot exchange in one step."""
    if not os.path.lexists(path):
        for part in os.scandir(path.parent):
            old = Path(part.path, "old")
            if _is_part(part.name, _prefix(path.name)) and old.is_dir():
                old.rename(path)
                return


@contextlib.contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """Give a folder to fill with files, which then take their places beside others in `folder`.

    Where the block raises or a file cannot be written, `folder` is as before.

    Raises:
        Unwritable: a full disk, a lack of rights.
    """
    if not os.path.lexists(folder):
        with new_folder(folder) as part:
            yield part
        return
    with writing(folder):
        tidy(folder, "new", ABANDONED_S)
        with tempfile.TemporaryDirectory(_PART, _prefix("new"), folder) as name:
            part = Path(name)
            yield part
            made = sorted(part.iterdir())
            for file in made:
                sync(file)
            for file in made:
                file.replace(folder / file.name)
            sync(folder)


def append(path: Path) -> io.FileIO:
    """Open a file, or make one, for `add` to write at its end. No link is followed.

    The descriptor can be read from too.

    Raises:
        Unwritable: it is a link or no regular file, or a lack of rights.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with writing(path):
        file = io.FileIO(os.open(path, flags, 0o666), "ab")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "no regular file")
    return file


def add(file: io.FileIO, data: bytes) -> None:
    """Write all of some bytes; where that fails, none stay in a buffer.

    Raises:
        OSError: a full disk; some bytes may have been written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False, busy: str = "") -> Iterator[None]:
    """Hold a lock file, which exists only meanwhile; a process that dies releases it.

    Args:
        path: the lock file.
        wait: wait for another process that holds it, rather than fail.
        busy: what is said where one does.

    Raises:
        Busy: another process holds it, and `wait` is False.
        Unwritable: a missing folder, a lack of rights.
    """
    try:
        handle = _lock(path, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise Busy(busy or f"{path}: another process holds it") from None
    except OSError as error:
        raise Unwritable(path, error) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _lock(path: Path, how: int) -> int:
    """Return a lock file's handle once it is locked and is still the file of that name."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(handle, how)
            if os.path.samestat(os.fstat(handle), path.lstat()):
                return handle
        except FileNotFoundError:  # its last holder has removed it
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def remove(folder: Path) -> None:
    """Remove a folder, or a link to one; an interrupted removal leaves no half of it.

    Raises:
        OSError: it cannot be removed.
    """
    gone = Path(tempfile.mkdtemp(_PART, _prefix(folder.name), folder.parent))
    folder.rename(gone / "gone")
    _remove(gone)


@contextlib.contextmanager
def scratch(folder: Path, name: str) -> Iterator[Path]:
    """Give a temporary folder in another, and remove it at the end.

    Args:
        folder: a folder on the file system where the results are to be.
        name: the name by which `tidy` finds what a killed process left.

    Raises:
        Unwritable: a full disk, a lack of rights.
    """
    with writing(folder):
        made = tempfile.mkdtemp(_PART, _prefix(name), folder)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def tidy(folder: Path, name: str, older_s: float = 0.0) -> None:
    """Remove the parts that killed writers of a name left in a folder.

    A folder of that name which they had moved away, but not replaced yet, is put back.

    Args:
        folder: the folder of the written file or folder.
        name: the written file's or folder's name.
        older_s: the least seconds since the last write to a part. With 0 the caller knows that
            nobody writes.
    """
    with contextlib.suppress(OSError):
        _put_back(folder / name)
        for part in os.scandir(folder):
            if _is_part(part.name, _prefix(name)):
                with contextlib.suppress(OSError):
                    if time.time() - _last_written(Path(part.path)) >= older_s:
                        _remove(Path(part.path))


def _prefix(name: str) -> str:
    return f".{name[:100]}."


def _is_part(name: str, prefix: str) -> bool:
    """Return whether a name is a part's with this prefix, and not with a longer one."""
    drawn = name.removeprefix(prefix).removesuffix(_PART)
    return name == f"{prefix}{drawn}{_PART}" and "." not in drawn


def _last_written(path: Path) -> float:
    """Return the time of the last write to a file, or to anything in a folder."""
    below = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    return max(file.lstat().st_mtime for file in (path, *below))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Write a file, or a folder's entries, through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: Path) -> None:
    """Check that a file can be written, before an hour of work rather than after it.

    Raises:
        Unwritable: it cannot.
    """
    with writing(path):
        if path.is_dir():
            raise UsageError(f"{path}: is a folder: expected a file to write")
        if (own := _descriptor(path)) is not None:
            os.write(own, b"")
        elif path.is_fifo():
            return  # opening it would wait for a reader
        elif path.exists() and not path.is_file():
            path.open("ab").close()
        elif path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
        else:
            handle, name = tempfile.mkstemp(_PART, _prefix(path.name), path.absolute().parent)
            os.close(handle)
            os.unlink(name)


def check_output(option: str, path: Path | None, *suffixes: str) -> None:
    """Check an option's file, its name and that it can be written, before an hour of work.

    Args:
        path: None where the option was not given.
        suffixes: the suffixes that its name may have.

    Raises:
        UsageError: the message says what is expected.
    """
    if path is None:
        return
    if not path.name.lower().endswith(suffixes):
        kinds = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise UsageError(f"{option} {path}: expected a file named {kinds}")
    check_writable(path)


def check_new(option: str, folder: Path) -> None:
    """Check that an option's folder holds no more than what a killed writer of it left.

    Raises:
        UsageError: it does, or is no folder.
    """
    name = folder.absolute().name

    def is_left(file: Path) -> bool:
        return file.name.startswith(f".{name}.") and file.suffix in (_PART, ".lock")

    try:
        taken = folder.exists() and not (folder.is_dir() and all(map(is_left, folder.iterdir())))
    except OSError as error:
        raise UsageError(f"{option} {folder}: {error.strerror}") from None
    if taken:
        raise UsageError(f"{option} {folder}: expected a new or empty folder")


def cache() -> Path:
    """Return the cache's folder: ``$JETFIRE_CACHE``, else the user's cache."""
    import platformdirs

    return Path(os.environ.get("JETFIRE_CACHE") or platformdirs.user_cache_path("jetfire"))

"""Files: read within bounds, and written so that they are whole or not there."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from jetfire.ops.errors import UsageError

MIB = 1 << 20
_PART = ".part"
# A part that was last written to so long ago has lost its writer.
ABANDONED_S = 3600.0


class Unreadable(UsageError):
    """A file that cannot be used; `reason` says why without naming the file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class Missing(Unreadable):
    """There is no such file."""


class Unwritable(UsageError):
    """A file or folder that cannot be written; what was there before is still there."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: cannot be written: {error.strerror or error}")
        self.path = path


def read(path: Path, most: int) -> bytes:
    """Return the content of a regular file; one whose name ends in ``.gz`` is unpacked.

    A pipe is read only where the shell made it (``/dev/stdin``, ``/dev/fd/63``): another might
    never end, or never begin.

    Args:
        path: the file.
        most: bytes that it may hold, packed and unpacked.

    Raises:
        Missing: there is no such file.
        Unreadable: it is no regular file, is larger than that, or cannot be read or unpacked.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISFIFO(mode) and path.absolute().parts[1] in ("dev", "proc"):
                os.set_blocking(file.fileno(), True)
            elif not stat.S_ISREG(mode):
                raise Unreadable(path, "no regular file")
            data = file.read(most + 1)
        if path.suffix == ".gz" and len(data) <= most:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(most + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Missing(path, str(error.strerror)) from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise Unreadable(path, getattr(error, "strerror", None) or str(error)) from None
    if len(data) > most:
        raise Unreadable(path, f"more than {most} bytes: expected at most that many")
    return data


def _open_at_once(name: str, flags: int) -> int:
    """Open a file without waiting for a pipe's other end."""
    return os.open(name, flags | os.O_NONBLOCK)


def write(path: Path, content: bytes | str, *, alone: bool = False, folders: bool = False) -> None:
    """Replace a file by one that is whole and on the disk; text is written as UTF-8.

    The content goes to another file in the same folder first, so a link is replaced and not
    followed. A device or a pipe is written to as it is.

    Args:
        path: the file.
        content: all that it is to hold.
        alone: the caller keeps other writers of this file away, so that whatever one has left half
            done is a dead one's and is removed.
        folders: make the folders that it is to be in.

    Raises:
        Unwritable: a full disk, a missing folder, a lack of rights.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        tidy(path.parent, path.name, 0.0 if alone else ABANDONED_S)
        handle, name = tempfile.mkstemp(_PART, _prefix(path.name), path.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
                out.flush()
                os.fchmod(out.fileno(), _mode(path))
                os.fsync(out.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        sync(path.parent)
    except OSError as error:
        raise Unwritable(path, error) from None


def _mode(path: Path) -> int:
    """Return the permissions of a file that is replaced, or of a new one."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill, which then takes the place of `path`, whole and on the disk.

    Whoever has mapped files of the folder that stood there keeps them. Where the block raises,
    or the process dies in it, `path` is what it was.

    Raises:
        Unwritable: a full disk, a lack of rights.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tidy(path.parent, path.name, ABANDONED_S)
        with tempfile.TemporaryDirectory(_PART, _prefix(path.name), path.parent) as name:
            part = Path(name) / "new"
            part.mkdir()
            yield part
            for file in part.rglob("*"):
                sync(file)
            sync(part)
            if path.exists():
                path.replace(Path(name) / "old")
            part.replace(path)
            sync(path.parent)
    except OSError as error:
        raise Unwritable(path, error) from None


def tidy(folder: Path, name: str = "*", older_s: float = 0.0) -> None:
    """Remove what killed writers of files and folders of a name left in a folder.

    Args:
        folder: where they wrote.
        name: what they wrote, any name by default.
        older_s: seconds since it was last written to; with 0 the caller knows that nobody writes.
    """
    prefix = "." if name == "*" else _prefix(name)
    with contextlib.suppress(OSError):
        for part in os.scandir(folder):
            if part.name.startswith(prefix) and part.name.endswith(_PART):
                with contextlib.suppress(OSError):
                    if time.time() - _last_written(Path(part.path)) >= older_s:
                        _remove(Path(part.path))


def _prefix(name: str) -> str:
    return f".{name[:100]}."


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
    """Force a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: Path) -> None:
    """Fail before an hour of work rather than after it.

    Raises:
        Unwritable: a file cannot be written there.
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a folder: expected a file to write")
    try:
        if path.exists() and not path.is_file():
            path.open("ab").close()
        elif path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
        else:
            handle, name = tempfile.mkstemp(_PART, _prefix(path.name), path.resolve().parent)
            os.close(handle)
            os.unlink(name)
    except OSError as error:
        raise Unwritable(path, error) from None

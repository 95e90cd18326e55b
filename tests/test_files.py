"""Reading that ends, and files that are whole or not there."""

import errno
import gzip
import hashlib
import io
import os
import stat
import threading
import time

import pytest

from jetfire.core import files
from jetfire.core.errors import UsageError
from jetfire.core.files import Busy, Missing, Unreadable, Unwritable


def fill_the_disk(monkeypatch):
    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_file_is_read_up_to_a_size(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"12345")
    assert files.read(file, 5) == b"12345"
    with pytest.raises(Unreadable, match="more than 4 bytes: expected at most that many"):
        files.read(file, 4)


def test_what_is_packed_small_may_not_be_large(tmp_path):
    file = tmp_path / "f.gz"
    file.write_bytes(gzip.compress(bytes(1 << 20)))
    assert files.read(file, 1 << 20) == bytes(1 << 20)
    with pytest.raises(Unreadable, match="more than"):
        files.read(file, (1 << 20) - 1)
    file.write_bytes(gzip.compress(b"text")[:-3])
    with pytest.raises(Unreadable, match="ended before"):
        files.read(file, 100)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(Unreadable, match=r"no regular file|Is a directory"):
            files.read(files.Path(path), 100)
    with pytest.raises(Missing):
        files.read(tmp_path / "none", 100)
    with pytest.raises(Missing):
        files.read(tmp_path / "pipe" / "none", 100)


def test_a_pipe_of_the_shell_is_read():
    out, into = os.pipe()
    os.write(into, b"text")
    os.close(into)
    assert files.read(files.Path(f"/dev/fd/{out}"), 100) == b"text"
    os.close(out)


@pytest.mark.parametrize("content", ["after", b"after"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, content):
    file = tmp_path / "r.json"
    file.write_text("before")
    fill_the_disk(monkeypatch)
    with pytest.raises(Unwritable, match=r"r.json: cannot be written: No space left on device"):
        files.write(file, content)
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["r.json"]


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    real = os.replace
    monkeypatch.setattr(os, "fsync", lambda _: done.append("sync"))
    monkeypatch.setattr(os, "replace", lambda *a: (done.append("rename"), real(*a)))
    files.write(tmp_path / "f", "x")
    assert done == ["sync", "rename", "sync"]


def test_written_files_have_ordinary_permissions_or_keep_theirs(tmp_path):
    file = tmp_path / "r.json"
    files.write(file, "x")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    file.chmod(0o600)
    files.write(file, "y")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / "link").symlink_to("other")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "other").read_text() == "kept"
    assert (tmp_path / "link").read_text() == "new"


def test_what_the_process_has_open_is_written_to_and_not_replaced(tmp_path, monkeypatch):
    """As in `jetfire bench gemm -o /dev/stdout > log`, after what was printed."""
    replaced = []
    monkeypatch.setattr(os, "replace", lambda *names: replaced.append(names))
    with (tmp_path / "log").open("wb", buffering=0) as out:
        for name in (f"/dev/fd/{out.fileno()}", f"/proc/self/fd/{out.fileno()}"):
            out.write(b"before ")
            files.check_writable(files.Path(name))
            files.write(files.Path(name), "written ")
        out.write(b"after")
    assert (tmp_path / "log").read_text() == "before written before written after"
    assert replaced == []
    with (tmp_path / "log").open("rb") as into:
        name = files.Path(f"/dev/fd/{into.fileno()}")
        for act in (files.check_writable, lambda path: files.write(path, "x")):
            with pytest.raises(Unwritable, match="Bad file descriptor"):
                act(name)
    streams = map(files.Path, ("/dev/stdin", "/dev/stdout", "/dev/../dev/stderr"))
    assert [files._descriptor(path) for path in streams] == [0, 1, 2]


def test_memory_that_is_a_file_is_replaced_as_any_other(tmp_path):
    for name in ("/dev/shm/r.json", "/proc/1/fd/1", "dev/stdout", tmp_path / "stdout"):
        assert files._descriptor(files.Path(name)) is None


def test_folders_are_made_where_asked(tmp_path):
    with pytest.raises(Unwritable, match="No such file"):
        files.write(tmp_path / "a" / "b" / "f", "x")
    files.write(tmp_path / "a" / "b" / "f", "x", folders=True)
    assert (tmp_path / "a" / "b" / "f").read_text() == "x"


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    place = tmp_path / "made"
    with pytest.raises(ZeroDivisionError), files.new_folder(place) as part:
        (part / "half").write_text(str(1 / 0))
    assert os.listdir(tmp_path) == []
    for text in ("one", "two"):
        with files.new_folder(place) as part:
            assert not any(part.iterdir())
            (part / "sub").mkdir()
            (part / "sub" / "f").write_text(text)
        assert (place / "sub" / "f").read_text() == text
    assert os.listdir(tmp_path) == ["made"]


def test_a_folder_and_its_files_are_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, replace = [], files._replace_folder
    monkeypatch.setattr(files, "sync", lambda path: done.append(path.name))
    monkeypatch.setattr(
        files, "_replace_folder", lambda *paths: (done.append("rename"), replace(*paths))
    )
    with files.new_folder(tmp_path / "made") as part:
        (part / "sub").mkdir()
        (part / "sub" / "f").write_text("x")
    assert sorted(done[:-2]) == ["f", "new", "sub"]
    assert done[-2:] == ["rename", tmp_path.name]


def test_a_folder_that_cannot_be_written_stays_what_it_was(tmp_path, monkeypatch):
    place = tmp_path / "made"
    place.mkdir()
    (place / "f").write_text("before")
    fill_the_disk(monkeypatch)
    with pytest.raises(Unwritable, match="No space left"), files.new_folder(place) as part:
        (part / "f").write_text("after")
    assert (place / "f").read_text() == "before"
    assert os.listdir(tmp_path) == ["made"]


def test_what_a_killed_writer_left_goes_after_an_hour_or_at_once(tmp_path):
    left = tmp_path / ".f.x1y2.part"
    other = tmp_path / ".g.x1y2.part"
    for part in (left, other):
        part.mkdir()
        (part / "new").write_text("half")
    files.write(tmp_path / "f", "x")
    assert left.exists()  # it may be another writer's
    long_ago = time.time() - 2 * files.ABANDONED_S
    os.utime(left, (long_ago, long_ago))
    files.write(tmp_path / "f", "x")
    assert left.exists()  # something in it was written to just now
    os.utime(left / "new", (long_ago, long_ago))
    files.write(tmp_path / "f", "x")
    assert not left.exists()
    left.write_text("half")
    files.write(tmp_path / "f", "x", alone=True)
    assert not left.exists()
    assert other.exists()
    files.tidy(tmp_path, "g")
    assert os.listdir(tmp_path) == ["f"]


def test_the_parts_of_a_longer_name_are_another_files(tmp_path):
    (tmp_path / ".f.json.x1y2z3a4.part").write_text("half")
    files.write(tmp_path / "f", "x", alone=True)
    assert sorted(os.listdir(tmp_path)) == [".f.json.x1y2z3a4.part", "f"]


def test_a_scratch_folder_goes_whatever_happens(tmp_path):
    with files.scratch(tmp_path, "out") as scratch:
        (scratch / "f").write_text("x")
    with pytest.raises(ZeroDivisionError), files.scratch(tmp_path, "out") as scratch:
        (scratch / "f").write_text(str(1 / 0))
    assert os.listdir(tmp_path) == []
    with pytest.raises(Unwritable, match="No such file"), files.scratch(tmp_path / "no", "out"):
        pass
    (tmp_path / ".out.x1y2z3a4.part").mkdir()
    files.tidy(tmp_path, "out")
    assert os.listdir(tmp_path) == []


def test_unwritable_places(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        files.check_writable(tmp_path)
    with pytest.raises(UsageError, match="No such file"):
        files.check_writable(tmp_path / "none" / "r.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Not a directory"):
        files.check_writable(tmp_path / "file" / "r.json")
    files.check_writable(tmp_path / "new.json")
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_looked_at_is_where_it_is_written(tmp_path):
    """A link is replaced: it matters not whether its target's folder is there."""
    (tmp_path / "link").symlink_to(tmp_path / "none" / "r.json")
    files.check_writable(tmp_path / "link")
    files.write(tmp_path / "link", "x")
    assert (tmp_path / "link").read_text() == "x"
    (tmp_path / "loop").symlink_to("loop")
    long = "x" * 300
    for name, says in (
        ("loop/r.json", "Too many levels"),
        (long, "File name too long"),
        (f"{long}/r.json", "File name too long"),
    ):
        with pytest.raises(Unwritable, match=says):
            files.check_writable(tmp_path / name)


def test_an_interrupt_once_a_file_has_its_name_is_an_interrupt(tmp_path, monkeypatch):
    replace = os.replace

    def interrupted(*names):
        replace(*names)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "f", "x")
    assert os.listdir(tmp_path) == ["f"]


def test_a_file_written_bit_by_bit_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "f"
    file.write_text("before")
    with pytest.raises(ZeroDivisionError), files.new_file(file) as out:
        out.write(b"half") / 0
    assert (file.read_text(), os.listdir(tmp_path)) == ("before", ["f"])
    with files.new_file(file) as out:
        out.write(b"af")
        out.write(b"ter")
        assert file.read_text() == "before"
    assert (file.read_text(), os.listdir(tmp_path)) == ("after", ["f"])


def test_a_digest_is_of_a_whole_file(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(bytes(3 << 20) + b"x")
    seen = []
    digest = files.digest(file, lambda block: seen.append(bytes(block)))
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert b"".join(seen) == file.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(Unreadable, match=r"regular file|Is a directory|No such file"):
            files.digest(path)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_at_no_moment_without_either(tmp_path, monkeypatch, exchange):
    """Where the system cannot exchange them, a replacement that was cut short is undone."""
    place = tmp_path / "made"
    place.mkdir()
    (place / "f").write_text("before")
    if not exchange:
        monkeypatch.setattr(files, "_exchanged", lambda *_: False)
    rename, seen = files.Path.rename, []

    def spy(self, target):
        seen.append(place.exists())
        return rename(self, target)

    monkeypatch.setattr(files.Path, "rename", spy)
    with files.new_folder(place) as part:
        (part / "f").write_text("after")
    assert (place / "f").read_text() == "after"
    assert seen == ([] if exchange else [True, False])
    # As a process leaves it that is killed between the two.
    (tmp_path / ".made.x1y2.part").mkdir()
    rename(place, tmp_path / ".made.x1y2.part" / "old")
    with pytest.raises(ZeroDivisionError), files.new_folder(place):
        assert 1 / 0
    assert (place / "f").read_text() == "after"


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    place = tmp_path / "made"
    place.mkdir()
    (place / "f").write_text("before")
    rename = files.Path.rename

    def fail(self, target):
        if self.name == "new":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(files, "_exchanged", lambda *_: False)
    monkeypatch.setattr(files.Path, "rename", fail)
    with pytest.raises(Unwritable), files.new_folder(place) as part:
        (part / "f").write_text("after")
    assert (place / "f").read_text() == "before"
    assert os.listdir(tmp_path) == ["made"]


def test_files_take_their_places_beside_others_together_or_not_at_all(tmp_path, monkeypatch):
    place = tmp_path / "made"
    with files.new_files(place) as part:
        (part / "a").write_text("one")
    (place / "other").write_text("kept")
    with files.new_files(place) as part:
        (part / "a").write_text("two")
        (part / "b").write_text("two")
        assert (place / "a").read_text() == "one"
    fill_the_disk(monkeypatch)
    with pytest.raises(Unwritable, match="No space left"), files.new_files(place) as part:
        (part / "a").write_text("three")
    with pytest.raises(Unwritable, match="No space left"), files.new_files(tmp_path / "x") as part:
        (part / "a").write_text("three")
    assert {p.name: p.read_text() for p in place.iterdir()} == {
        "a": "two",
        "b": "two",
        "other": "kept",
    }
    assert os.listdir(tmp_path) == ["made"]


def test_what_is_appended_follows_no_link(tmp_path):
    for text in (b"one", b"two"):
        with files.append(tmp_path / "log") as out:
            files.add(out, text)
    assert (tmp_path / "log").read_text() == "onetwo"
    (tmp_path / "link").symlink_to("log")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "none/log"):
        with pytest.raises(Unwritable, match=name):
            files.append(tmp_path / name)
    assert (tmp_path / "log").read_text() == "onetwo"


def test_what_is_added_is_added_whole_though_each_write_takes_a_little(tmp_path):
    class Slow(io.FileIO):
        def write(self, data):
            return super().write(data[:3])

    with Slow(tmp_path / "log", "ab") as out:
        files.add(out, b"a whole line\n")
    assert (tmp_path / "log").read_text() == "a whole line\n"


def test_a_lock_is_held_by_one_and_gone_afterwards(tmp_path):
    lock = tmp_path / ".lock"
    with files.locked(lock), pytest.raises(Busy, match="another process"), files.locked(lock):
        pass
    assert not lock.exists()
    lock.touch()  # of a process that was killed
    with files.locked(lock):
        pass
    assert not lock.exists()
    lock.symlink_to("elsewhere")
    with pytest.raises(Unwritable), files.locked(lock):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_those_who_wait_for_a_lock_take_turns(tmp_path):
    """The holder removes the file that the others wait at."""
    lock, inside, most = tmp_path / ".lock", [], []

    def work():
        for _ in range(50):
            with files.locked(lock, wait=True):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(most), max(most)) == (200, 1)
    assert not lock.exists()


def test_a_folder_is_removed_and_what_a_link_names_is_not(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "f").write_text("x")
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner").symlink_to(kept)
    for name in ("link", "folder"):
        files.remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"]
    assert (kept / "f").read_text() == "x"

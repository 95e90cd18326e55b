"""Kill trainers, preparations and exports at random moments, and see that nothing is lost.

    python tests/processes/kills.py --kills 100 --pairs 10 --folder EMPTY

Each command runs in a fork of this process, which has torch already, on one thread. A pair is two
of the same command at once, both killed. After every kill what was whole before is whole, a log has
what it had, and the command that is run to its end gives bit for bit what an undisturbed one gives.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from jetfire.cli import execute
from jetfire.gpt2.data import tokens as data
from jetfire.gpt2.training import checkpoint, log
from jetfire.tests.given import changed

SETTINGS = (
    "layers=1,heads=2,width=32,context=16,batch=4,warmup=2,dropout=0.1,evaluate_every=5,"
    "evaluate_batches=1,checkpoint_every=1,keep=2"
)
STEPS = 12
# What one of two at once may be told.
REFUSED = ("another process is training there", "holds a run: --resume goes on with it")


class Child:
    """A command of `jetfire-train` in a process of its own."""

    def __init__(self, words: Sequence[str], said: Path) -> None:
        self.words, self.said = words, said
        said.write_text("")  # here: the process may be killed before it opens the file
        self.pid = os.fork()
        if self.pid == 0:
            self._run()

    def _run(self) -> None:
        code = 70
        try:
            with self.said.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                code = execute("train", self.words)
        finally:
            os._exit(code)

    def end(self) -> int | None:
        """Wait; gives the exit code, None if it was killed."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None if code == -signal.SIGKILL else code

    def killed_after(self, seconds: float) -> int | None:
        """As `end`, once it was killed if it still ran then."""
        descriptor = os.pidfd_open(self.pid)
        ended, _, _ = select.select([descriptor], [], [], max(0.0, seconds))
        os.close(descriptor)
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
        return self.end()


class Storm:
    """Commands of one kind that are killed.

    Args:
        home: an empty folder; recipe, more: of runs, and further settings of theirs.

    Attributes:
        kills, pairs, ended: how many there were; commands that came to their end.
    """

    def __init__(self, home: Path, random_: random.Random, recipe: str, more: str) -> None:
        home.mkdir()
        self.home, self.random, self.recipe, self.more = home, random_, recipe, more
        self.kills = self.pairs = self.ended = 0
        self.seconds = 0.0

    def words(self) -> list[str]:
        """The command that goes on with what there is."""
        raise NotImplementedError

    def check(self) -> None:
        """What must hold after every kill."""
        raise NotImplementedError

    def check_end(self) -> None:
        """What must hold once the command came to its end; begins anew."""
        raise NotImplementedError

    def start(self, name: str = "said") -> Child:
        return Child(self.words(), self.home.parent / f"{self.home.name}.{name}")

    def whole(self) -> None:
        """Run the command to its end; its time is that in which it is killed."""
        begin = time.monotonic()
        child = self.start()
        assert child.end() == 0, child.said.read_text()
        self.seconds = time.monotonic() - begin

    def kill(self, pair: bool) -> None:
        """Kill the command once, or two of them; one that ends first is no kill."""
        children = [self.start(name) for name in (("one", "other") if pair else ("one",))]
        seconds = 1.1 * self.seconds
        if pair and self.random.random() < 0.5:
            seconds /= 10  # while the one that is to be refused still runs
        moments = sorted(self.random.uniform(0, seconds) for _ in children)
        begin = time.monotonic()
        codes = [
            child.killed_after(begin + moment - time.monotonic())
            for child, moment in zip(children, moments, strict=True)
        ]
        for child, code in zip(children, codes, strict=True):
            text = child.said.read_text()
            refused = pair and code == 2 and any(reason in text for reason in REFUSED)
            assert code in (0, None) or refused, (code, text)
        self.kills += codes.count(None)
        self.pairs += codes.count(None) == 2
        self.check()
        if 0 in codes:
            self.ended += 1
            self.check_end()

    def finish(self) -> None:
        self.whole()
        self.check_end()


class Trainers(Storm):
    """A run that is killed again and again until it comes to its end, then another."""

    def __init__(self, home: Path, random_: random.Random, recipe: str, more: str) -> None:
        super().__init__(home, random_, recipe, more)
        (home / "text.txt").write_text(" ".join(str(i) for i in range(4000)))
        self.run, self.number = home / "warm-up", 0
        execute("train", self.words())  # so that what it imports is here when it forks
        self.run = home / "undisturbed"
        self.whole()
        self.expected = self.outcome()
        self._begin()

    def _begin(self) -> None:
        self.number += 1
        self.run = self.home / f"run-{self.number}"
        self.log, self.newest = b"", 0

    def words(self) -> list[str]:
        os.environ["JETFIRE_CACHE"] = str(self.home / f"{self.run.name}.cache")
        where = ["-o", str(self.run), "--device", "cpu"]
        if (self.run / "settings.json").exists():
            return ["--resume", *where]
        return [
            "tiny",
            "--data",
            str(self.home / "text.txt"),
            "--steps",
            str(STEPS),
            "--recipe",
            self.recipe,
            "--set",
            changed(SETTINGS, self.more),
            *where,
        ]

    def outcome(self) -> tuple[list[tuple[int, float, float]], dict[str, bytes]]:
        """Losses and norms of the steps, and the last checkpoint's files."""
        steps = [r for r in log.read(self.run) if r["kind"] == "step"]
        last = checkpoint.listed(self.run)[-1]
        kept = {file.name: file.read_bytes() for file in last.iterdir()}
        return [(r["step"], r["loss"], r["norm"]) for r in steps], kept

    def check(self) -> None:
        file = self.run / log.NAME
        content = file.read_bytes() if file.exists() else b""
        assert content.startswith(self.log), "the log lost what it had"
        self.log = content
        steps = [checkpoint.open_checkpoint(path).step for path in checkpoint.listed(self.run)]
        newest = max(steps, default=0)
        assert newest >= self.newest, f"step {self.newest} was kept, and now {newest}"
        self.newest = newest

    def check_end(self) -> None:
        found, kept = self.outcome()
        expected, last = self.expected
        assert found == expected
        for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
            assert kept[name] == last[name], name
        shutil.rmtree(self.run)
        shutil.rmtree(self.home / f"{self.run.name}.cache")
        self._begin()

    def finish(self) -> None:
        self.whole()
        left = [
            path for path in self.home.rglob(".*") if path.name == ".lock" or ".part" in path.name
        ]
        assert left == []
        self.check_end()


class Preparations(Storm):
    """A folder that is prepared from one text and then another, over and over."""

    def __init__(self, home: Path, random_: random.Random, recipe: str, more: str) -> None:
        super().__init__(home, random_, recipe, more)
        self.texts = [" ".join(str(i * k) for i in range(120_000)) for k in (3, 7)]
        self.out, self.turn = home / "tokens", 0
        self.digests: list[str | None] = []
        for _ in self.texts:
            self._write()
            self.whole()
            self.digests.append(self._digest())
            self.turn += 1
        self.before = self.digests[-1]
        self._write()

    def _write(self) -> None:
        (self.home / "text.txt").write_text(self.texts[self.turn % 2])

    def _digest(self) -> str | None:
        """That of the prepared tokens, which are whole; None without any."""
        if not self.out.exists():
            return None
        return data.open_tokens(self.out).meta["sha256"]["train"]

    def words(self) -> list[str]:
        os.environ["JETFIRE_CACHE"] = str(self.home / "cache")
        return ["prepare", str(self.home / "text.txt"), "--tokenizer", "byte", "-o", str(self.out)]

    def check(self) -> None:
        assert self._digest() in (self.before, self.digests[self.turn % 2])

    def check_end(self) -> None:
        assert self._digest() == self.digests[self.turn % 2]
        self.turn += 1
        self._write()
        self.before = self._digest()
        if self.random.random() < 0.3:
            shutil.rmtree(self.out)
            self.before = None

    def finish(self) -> None:
        self.whole()
        assert {path.name for path in self.home.iterdir()} <= {"text.txt", "tokens", "cache"}
        self.check_end()


class Exports(Storm):
    """A run's weights written over others, in a folder that holds something else too."""

    def __init__(self, home: Path, random_: random.Random, recipe: str, more: str) -> None:
        super().__init__(home, random_, recipe, more)
        (home / "text.txt").write_text(" ".join(str(i) for i in range(4000)))
        os.environ["JETFIRE_CACHE"] = str(home / "cache")
        for steps in (1, 2):
            words = [
                "tiny",
                "--data",
                str(home / "text.txt"),
                "--steps",
                str(steps),
                "--set",
                changed(SETTINGS, f"width={32 * steps}"),
                "-o",
                str(home / f"run-{steps}"),
                "--recipe",
                self.recipe,
                "--device",
                "cpu",
            ]
            child = Child(words, home.parent / "runs.said")
            assert child.end() == 0, child.said.read_text()
        self.out, self.turn = home / "weights", 0
        self.contents = []
        for _ in range(2):
            self.whole()
            self.contents.append(self._content())
            self.turn += 1
        (self.out / "README.md").write_text("mine")

    def _content(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in self.out.iterdir() if file.is_file()}

    def words(self) -> list[str]:
        return ["export", str(self.home / f"run-{self.turn % 2 + 1}"), "-o", str(self.out)]

    def check(self) -> None:
        found = self._content()
        assert found.pop("README.md") == b"mine"
        for name, content in found.items():
            assert content in [one[name] for one in self.contents], name

    def check_end(self) -> None:
        assert self._content() == {**self.contents[self.turn % 2], "README.md": b"mine"}
        self.turn += 1
        long_ago = time.time() - 7200
        for part in self.out.glob(".*.part"):  # which the next one removes if it is an hour old
            for path in (part, *part.rglob("*")):
                os.utime(path, (long_ago, long_ago))

    def finish(self) -> None:
        super().finish()
        super().finish()
        assert not list(self.out.glob(".*.part"))


KINDS: dict[str, Callable[[Path, random.Random, str, str], Storm]] = {
    "trainers": Trainers,
    "preparations": Preparations,
    "exports": Exports,
}


def storm(given: str, folder: Path, kills: int, pairs: int, seed: int) -> str:
    """Kill commands so often, of that so many pairs; gives what came of it in a line.

    Args:
        given: KIND, or KIND:RECIPE:SETTINGS with those of its runs. The folder made is named so.

    Raises:
        AssertionError: something was lost.
    """
    name, recipe, more = given.split(":") if ":" in given else (given, "bf16", "")
    one = KINDS[name](folder / given, random.Random(f"{seed} {given}"), recipe, more)
    while one.pairs < pairs:
        one.kill(pair=True)
    while one.kills < kills:
        one.kill(pair=False)
    one.finish()
    return (
        f"{given}: {one.kills} kills, of them {one.pairs} of two at once; {one.ended} came to "
        "their end and did what undisturbed ones do"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    storms = "of KIND or KIND:RECIPE:SETTINGS, kinds " + ", ".join(KINDS)
    parser.add_argument("--storms", nargs="+", default=list(KINDS), help=storms)
    parser.add_argument("--kills", type=int, default=100, help="in each storm")
    parser.add_argument("--pairs", type=int, default=10, help="in each storm, two at once")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    for one in given.storms:
        print(storm(one, given.folder, given.kills, given.pairs, given.seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

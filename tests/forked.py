"""Processes that are forked from one where torch is loaded already: the tests' own, or one beside.

A spawned one imports it for 1.7 s. Whatever tests how processes start spawns them.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch

from jetfire import cli
from jetfire.core import processes

FORK, SPAWN = (multiprocessing.get_context(name) for name in ("fork", "spawn"))
# Where torch was asked for a GPU, as the tests ask it first of all, no fork of it can have one.
FORKS = not torch.cuda.is_available()


class _Process(FORK.Process):
    """A child, without the warning of Python 3.12 where other threads run: none has our locks."""

    def start(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            super().start()


class _Context:
    """What a `Worker` takes from multiprocessing: its child is forked, and has no pipe but its own.

    One that runs under a command is spawned as ever.
    """

    def __init__(self):
        self._ours = weakref.WeakSet()

    def Pipe(self):
        ours, theirs = FORK.Pipe()
        self._ours.add(ours)
        return ours, theirs

    def Process(self, target, args, daemon):
        theirs, output, parent, *rest = args
        if parent is None:
            return SPAWN.Process(target=target, args=args, daemon=daemon)
        args = (target, theirs, output._file.fileno(), parent, *rest)
        return _Process(target=self._child, args=args, daemon=daemon)

    def _child(self, target, *args):
        for connection in self._ours:
            connection.close()
        _own_streams()
        target(*args)


def _own_streams():
    """Print to the descriptors, in place of what captures the tests' output."""
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)


def fork_workers(monkeypatch):
    """Have every `Worker` forked from now on, unless a GPU is here."""
    if FORKS:
        context = _Context()
        forking = SimpleNamespace(get_context=lambda name: context)
        monkeypatch.setattr(processes, "multiprocessing", forking)
        # The stack of a forked one is as deep as the tests', and so is its last traceback.
        monkeypatch.setattr(processes, "LOG_TAIL", 40_000)


def start(target, *args):
    """Start a process that calls a function; forked, unless a GPU is here."""
    kind = _Process if FORKS else SPAWN.Process
    process = kind(target=target, args=args)
    process.start()
    atexit.register(process.kill)  # else a failed test's is waited for
    return process


def torchrun(script, *words, **environment):
    """Have torchrun run a script in two processes; raise where it fails.

    They are its forks, or spawned by it where a GPU is here.

    Args:
        environment: what they are given beside this process's.
    """
    words = [str(script), *map(str, words)]
    if not FORKS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        subprocess.run([*command, "--nproc_per_node=2", *words], check=True, env=environment)
        return
    process = start(_torchrun, words, environment)  # which changes how signals are handled
    process.join(600)
    assert process.exitcode == 0


def _torchrun(words, environment):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _own_streams()
    os.environ.update(environment)
    alone = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(os.getpid())}
    config = LaunchConfig(1, 1, 2, start_method="fork", **alone)
    elastic_launch(config, _script)(words)


def _script(words):
    torch.set_num_threads(1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


class Started:
    """What `processes.started` gives of a command of ours, which is forked here."""

    def __init__(self, words, environment):
        ours, theirs = os.pipe()
        assert words[1:3] == ["-m", "jetfire.cli"]
        self._process = _Process(target=self._run, args=(words[3:], environment, theirs))
        self._process.start()
        os.close(theirs)
        self.pid, self.stdout = self._process.pid, os.fdopen(ours, errors="replace")
        self.terminate, self.wait = self._process.terminate, self._process.join

    def _run(self, words, environment, output):
        os.setpgid(0, 0)
        for number in (1, 2):
            os.dup2(output, number)
        _own_streams()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        sys.exit(cli.execute(words[0], words[1:]))

    def poll(self):
        return self._process.exitcode


class Command:
    """A command that runs in a process and a group of its own, as a terminal would start it.

    Args:
        before: what the process calls first.
        environment: what it is given beside this process's.
    """

    def __init__(self, name, words, before=lambda: None, **environment):
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        args = (name, list(map(str, words)), before, environment)
        self._process = _Process(target=self._run, args=args)
        self._process.start()
        atexit.register(self._process.kill)  # else a failed test's is waited for
        self.pid = self._process.pid

    def _run(self, name, words, before, environment):
        os.setsid()
        for number, file in enumerate(self._files, 1):
            os.dup2(file.fileno(), number)
        _own_streams()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(environment)
        tempfile.tempdir = None
        before()
        sys.exit(cli.execute(name, words))

    def runs(self):
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def said(self):
        """What it has printed on stdout and on stderr by now."""
        numbers = [file.fileno() for file in self._files]
        return tuple(os.pread(n, os.fstat(n).st_size, 0).decode() for n in numbers)

    def kill(self):
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.join()

    def end(self, limit_s):
        """Wait for its end: exit code, stdout, stderr; killed where it takes so many seconds."""
        self._process.join(limit_s)
        self.kill()
        return self._process.exitcode, *self.said()


class Python:
    """`python` in other processes, without Triton's interpreter unless they are told.

    They are forked from one that has loaded torch, and nothing of ours. It ends with the tests.

    Args:
        environment: what they are given beside this process's.
    """

    def __init__(self, **environment):
        self._own = environment
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "processes" / "python.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(),
        )

    def _environment(self):
        """What they are given: this process's, as it is now, and their own."""
        ours = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        return {**ours, **self._own}

    def __call__(self, *words, folder=".", **environment):
        """Run it with words after its name, in a folder, with more environment."""
        with tempfile.TemporaryDirectory() as home:
            files = [Path(home) / name for name in ("stdout", "stderr")]
            for file in files:
                file.touch()
            asked = {
                "words": [*map(str, words)],
                "folder": str(Path(folder).resolve()),
                "environment": {**self._environment(), **environment},
                "files": [*map(str, files)],
            }
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))

    def close(self):
        """End the process that they are forked from."""
        self._process.communicate()

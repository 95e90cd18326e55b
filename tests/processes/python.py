"""What `tests.forked.Python` starts: forks of it, where torch is loaded, are the Pythons asked for.

Each line of stdin names one, as `become` takes it. Each line of stdout is its exit code.
"""

import gc
import json
import multiprocessing
import os
import runpy
import sys

import torch  # noqa: F401


def become(words: list[str], folder: str, environment: dict[str, str], files: list[str]) -> None:
    """Do as Python would with such words, in a folder, with an environment and output files."""
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, *rest = words
    sys.argv = {"-m": rest, "-c": ["-c", *rest[1:]]}.get(kind, words)
    sys.path[0] = os.path.dirname(kind) if kind not in ("-m", "-c") else folder
    if kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(rest[0], {"__name__": "__main__"})
    else:
        runpy.run_path(kind, run_name="__main__")


gc.freeze()  # else each fork looks for garbage in torch, and so copies it
for line in sys.stdin:
    child = multiprocessing.get_context("fork").Process(target=become, kwargs=json.loads(line))
    child.start()
    child.join()
    print(child.exitcode, flush=True)

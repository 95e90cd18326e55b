"""Call a C library's functions under the fake driver, or without one; reads JSON, needs no package.

Prints ``code N`` for each call's result, after the lines of the driver, and what the function
``describe``, where one is named, says of it.
"""

import ctypes
import json
import sys
from concurrent.futures import ThreadPoolExecutor

request = json.load(sys.stdin)
libc = ctypes.CDLL(None)
if request["driver"] is not None:
    # Whoever opens libcuda.so.1 from now on gets the one of that name that is there.
    driver = ctypes.CDLL(request["driver"], ctypes.RTLD_GLOBAL)
    for number, kernel in enumerate(request["kernels"]):
        sizes = kernel["parameters"]
        driver.fake_kernel(
            number,
            ctypes.c_size_t(kernel["bytes"]),
            len(sizes),
            (ctypes.c_int * len(sizes))(*sizes),
        )
library = ctypes.CDLL(request["library"])
TYPES = {"pointer": ctypes.c_void_p, "int": ctypes.c_int}


def call(arguments: list) -> int:
    typed = [TYPES[kind](value) for kind, value in arguments]
    return getattr(library, request["function"])(*typed)


def say(code: int) -> None:
    libc.fflush(None)
    print("code", code, flush=True)
    if "describe" in request:
        describe = getattr(library, request["describe"])
        describe.restype = ctypes.c_char_p
        print("means", describe(code).decode(), flush=True)


if request["threads"] == 1:
    for arguments in request["calls"]:
        say(call(arguments))
else:
    with ThreadPoolExecutor(request["threads"]) as pool:
        for code in list(pool.map(call, request["calls"])):
            say(code)

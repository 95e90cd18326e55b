"""Files as strangers, or failing disks, might make them of good ones."""

import copy
import json

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from jetfire.core import schema

ESC = "\x1b]0;title\x07\x1b[2J"
MARKUP = "[red]x[/red] [/] [link=file:///etc/passwd]y[/link]"
VALUES = st.sampled_from(
    [
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        255,
        256,
        8192,
        2**31,
        2**63,
        10**400,
        0.5,
        -0.0,
        5e-324,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "0",
        "-1",
        "9" * 5000,
        "x",
        "gemm",
        "fwd",
        ESC,
        MARKUP,
        "| a |",
        "../../x",
        "/etc/passwd",
        "\ud800",
        "\u202e",
        "x" * 100_000,
        [],
        {},
        [[]],
        [{}],
        {"": 0},
        {"m": {"m": []}},
        {"name": "byte"},
        [1] * 1000,
        json.loads("[" * 100 + "]" * 100),
    ]
)

few = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def errors_kept(monkeypatch):
    """Return a list that gets how many wrong entries pydantic keeps of each value it refuses."""
    kept = []
    reason = schema._reason

    def counted(error):
        kept.append(error.error_count())
        return reason(error)

    monkeypatch.setattr(schema, "_reason", counted)
    return kept


def _places(value, path=()):
    """Yield the path of each value that a value holds, and its own, which is empty."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def replaced(content, *path, to):
    """Return a copy of JSON with the value at a path replaced."""
    content = copy.deepcopy(content)
    *upper, last = path
    held = content
    for key in upper:
        held = held[key]
    held[last] = to
    return content


@st.composite
def mutated(draw, content):
    """JSON of which some values are others, are gone, come twice or under another name."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 4))):
        *path, key = draw(st.sampled_from([path for path in _places(content) if path]))
        held = content
        for step in path:
            held = held[step]
        how = draw(st.sampled_from(["value", "value", "remove", "rename", "twice"]))
        if how == "remove":
            del held[key]
        elif how == "rename" and isinstance(held, dict):
            held[draw(st.sampled_from(["", "x", MARKUP, ESC, "schema"]))] = held.pop(key)
        elif how == "twice" and isinstance(held, list):
            held.insert(key, copy.deepcopy(held[key]))
        else:
            held[key] = copy.deepcopy(draw(VALUES))
        if not content:
            break
    return content


@st.composite
def damaged(draw, data):
    """Bytes of which some are others, gone, twice there or new, more often near the beginning."""
    content = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        end = draw(st.sampled_from([16, 2000, len(content)]))
        at = draw(st.integers(0, max(0, min(end, len(content)) - 1)))
        how = draw(st.sampled_from(["flip", "cut", "repeat", "insert"]))
        if how == "flip" and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del content[at : at + draw(st.sampled_from([1, 8, 1000, 1 << 30]))]
        elif how == "repeat":
            content[at:at] = content[at : at + 200]
        else:
            content[at:at] = draw(st.binary(min_size=1, max_size=9))
    return bytes(content)

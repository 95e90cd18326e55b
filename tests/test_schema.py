"""Files become values by their types, or one line says what is wrong where."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypedDict

from jetfire.core import schema
from jetfire.core.files import Unreadable
from jetfire.core.schema import Count, Fields, Line, Name, Plain, Positive, Ratios, Text, also
from jetfire.core.terminal import visible

FILE = Path("some.json")


@dataclass(frozen=True)
class Thing:
    name: Name
    ms: Positive
    fields: Fields
    shape: tuple[int, int] | None = None


GOOD = {"name": "a-b_c.d", "ms": 1, "fields": {"m": 8, "eps": 1e-5, "on": True, "x": None}}


def read(content, kind=Thing):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return schema.decode(text, kind, FILE)


def test_a_value_is_read_by_its_type():
    thing = read({**GOOD, "shape": [9, 0], "of a later version": 1})
    assert thing == Thing("a-b_c.d", 1.0, GOOD["fields"], (9, 0))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a":' * 100_000, "no JSON"),
        ([], r"\[\]: expected a JSON object"),
        ({}, "name is missing"),
        ({**GOOD, "name": 3}, "name=3: expected text"),
        ({**GOOD, "name": "../x"}, r"name='../x': expected letters, digits and _ . \+ -"),
        ({**GOOD, "name": ".bashrc"}, "name='.bashrc': expected letters"),
        ({**GOOD, "name": "a\n"}, "expected letters"),
        ({**GOOD, "name": ""}, "name='': "),
        ({**GOOD, "ms": 0}, "ms=0: expected greater than 0"),
        ({**GOOD, "ms": "1"}, "ms='1': expected a number"),
        ({**GOOD, "ms": True}, "ms=True: expected a number"),
        (json.dumps({**GOOD, "ms": float("nan")}).encode(), "ms=nan: expected a finite number"),
        (json.dumps({**GOOD, "ms": float("inf")}).encode(), "ms=inf: expected a finite number"),
        (json.dumps(GOOD).replace('"ms": 1', '"ms": 1e999').encode(), "ms=inf"),
        ({**GOOD, "shape": 9}, "shape=9: expected a list"),
        ({**GOOD, "shape": [9, "0"]}, "shape.1='0': expected an integer"),
        ({**GOOD, "fields": {"m": [8]}}, r"fields.m=\[8\]: expected a finite number, text"),
        ({**GOOD, "fields": {"m": "\x1b[31m"}}, r"fields.m='\\x1b\[31m': expected text without"),
        ({**GOOD, "fields": {str(i): 0 for i in range(101)}}, "at most 100"),
        ({**GOOD, "fields": {"m": "x" * 3000}}, "at most 2000 characters"),
    ],
)
def test_what_is_no_value_is_told_in_a_short_line(content, says):
    with pytest.raises(Unreadable, match=says) as caught:
        read(content)
    text = str(caught.value)
    assert text.startswith("some.json: ")
    assert len(text) < 400
    assert text.isprintable()


@pytest.mark.parametrize("text", ["\x00", "a\x1b[2J", "\x7f", "\x9b31m", "\u2028", "\u202e", "\r"])
def test_text_without_what_a_terminal_obeys(text):
    for kind in (Line, Text):
        with pytest.raises(Unreadable, match="without control characters"):
            read(text, kind)
    for held in ([text], {"a": {"b": text}}, {text: 1}):
        with pytest.raises(Unreadable):
            read(held, Plain)


def test_what_a_terminal_obeys_can_be_shown():
    text = "a\x1b[2J\r\u202e\x9bm\x00 é\t\u3000\n"
    assert visible(text) == "a\\x1b[2J\\r\\u202e\\x9bm\\x00 é\t\u3000\n"
    read(visible(text), Text)


def test_lines_of_text():
    assert read("two\n\tlines", Text) == "two\n\tlines"
    with pytest.raises(Unreadable):
        read("two\nlines", Line)


@pytest.mark.parametrize(
    ("value", "kind"), [(-1, Count), (1.0, Count), (2**63, Count), ({"a": 0}, Ratios)]
)
def test_bounds(value, kind):
    with pytest.raises(Unreadable):
        read(value, kind)


def test_a_long_object_is_refused_before_each_of_its_entries():
    """Each wrong entry would be kept for the error's text."""
    many = {str(i): [] for i in range(2000)}
    for kind in (Fields, Ratios):
        with pytest.raises(Unreadable, match="expected at most 100 entries"):
            read(many, kind)
    for long in ([0] * 10_001, {"a": [0] * 10_001}, {str(i): 0 for i in range(10_001)}):
        with pytest.raises(Unreadable, match="at most 10000 entries"):
            read(long, Plain)


def test_a_value_may_be_of_two_types_and_keep_what_one_does_not_name():
    class Known(TypedDict, total=False):
        ms: Positive

    kind = Annotated[dict[Name, Plain], also(Known)]
    assert read({"ms": 1, "other": [2]}, kind) == {"ms": 1, "other": [2]}
    with pytest.raises(Unreadable, match="ms=0: expected greater than 0"):
        read({"ms": 0, "other": [2]}, kind)
    with pytest.raises(Unreadable, match=r"other='.*': expected text without"):
        read({"ms": 1, "other": "\x1b"}, kind)


def test_a_file_of_another_version_says_so(tmp_path):
    file = tmp_path / "f.json"
    for held in (3, "2", True, None, [1]):
        file.write_text(json.dumps({"schema": held, "other": "form"}))
        with pytest.raises(Unreadable, match=r"schema '.*': this version reads schema 2"):
            schema.load(file, Thing, version=2)


def test_lines_are_read_one_by_one(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_bytes(b'{"a": 1}\n\nnot JSON\n{"a": -1}\n{"a": 2}')
    found = list(schema.lines(file, dict[str, Count], 1000, 10))
    assert [x for x in found if isinstance(x, dict)] == [{"a": 1}, {"a": 2}]
    wrong = [x for x in found if isinstance(x, schema.BadLine)]
    assert [str(x).partition(": ")[2][:7] for x in wrong] == ["line 3:", "line 4:"]
    assert [(x.number, x.cut) for x in wrong] == [(3, False), (4, False)]
    file.write_bytes(b'{"a": 1}\n{"a"')
    (cut,) = [x for x in schema.lines(file, dict[str, Count], 1000, 10) if not isinstance(x, dict)]
    assert cut.cut


def test_lines_of_garbage_are_given_up(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_bytes(b"{}\n" + b"x\n" * 50_000)
    found = schema.lines(file, dict[str, Count], 1 << 20, 100_000)
    with pytest.raises(Unreadable, match="more than 10000 lines hold no value, the last 10002: "):
        list(found)
    file.write_bytes(b"\n" * 11)
    with pytest.raises(Unreadable, match="more than 10 lines: expected at most"):
        list(schema.lines(file, dict[str, Count], 1000, 10))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(JSON, st.sampled_from([Thing, Fields, Ratios, Plain, Line, dict[str, Any], list[Thing]]))
def test_any_json_is_a_value_or_a_line(value, kind):
    try:
        read(value, kind)
    except Unreadable as error:
        return_line = str(error)
    else:
        return
    assert return_line.isprintable()


@pytest.mark.parametrize(
    "value",
    [
        [[{}]] * 500,
        {"a": ["x" * 500, {"b": list(range(1000))}]},
        {str(i): {"x": [i]} for i in range(300)},
        [[], [[[]]]] * 90,
        "a" * 300,
        [1, 2.5, None, True, "é"],
    ],
)
def test_a_message_begins_as_the_value_s_text(value):
    """Of which a long one's is not made: that of 12 MB took 0.7 s."""
    assert schema._printable(repr(schema._beginning(value))) == schema._printable(repr(value))
    assert len(repr(schema._beginning(value))) < 1000

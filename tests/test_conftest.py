"""How the tests' own processes share a machine."""

from jetfire.tests import conftest


def test_each_process_begins_with_another_gpu():
    found = [conftest.gpus_from(turn, "0,2,3") for turn in range(4)]
    assert found == ["0,2,3", "2,3,0", "3,0,2", "0,2,3"]


def test_what_is_hidden_stays_hidden(monkeypatch):
    assert conftest.gpus_from(1, "5") == "5"
    assert conftest.gpus_from(1, "") == ""
    monkeypatch.setattr(conftest.Path, "glob", lambda *_: [])
    assert conftest.gpus_from(1, None) == ""

"""Fields of untrusted data: what is accepted, and the message for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from smartprune.errors import SmartpruneError
from smartprune.fields import MAX_INTEGER, Fields, is_valid_name, plain_data


def one(value: Any) -> Fields:
    return Fields({"key": value}, "file")


def test_values_of_the_right_type_are_returned() -> None:
    assert one(MAX_INTEGER).integer("key") == 2**63 - 1
    assert one(3).number("key") == 3.0
    assert one("conv1").text("key") == one("conv1").string("key") == "conv1"
    assert one("\x1b").string("key") == "\x1b"
    assert one(False).boolean("key") is False
    assert one([0, 5]).integers("key", 0, 2) == (0, 5)
    assert one(["a", "b"]).texts("key", 2) == ("a", "b")
    assert one("19/20").share("key") == Fraction(19, 20)
    assert one("0").share("key") == 0
    assert one(None).optional("key") is None
    assert one({"inner": 1}).nested("key").integer("inner") == 1


@pytest.mark.parametrize(
    ("value", "read", "message"),
    [
        (True, lambda f: f.integer("key"), "key is True; it must be an integer from 0 to"),
        (1.0, lambda f: f.integer("key"), "key is 1.0; it must be an integer"),
        (2**63, lambda f: f.integer("key"), "it must be an integer"),
        (-1, lambda f: f.integer("key", 0, 3), "from 0 to 3"),
        (10**400, lambda f: f.number("key"), "key is a huge integer; it must be a number"),
        (math.nan, lambda f: f.number("key"), "key is nan; it must be a number"),
        (True, lambda f: f.number("key"), "key is True; it must be a number"),
        ("\x1b[2J", lambda f: f.text("key"), "printable characters"),
        ("x" * 11, lambda f: f.text("key", 10), "at most 10 printable"),
        (b"x", lambda f: f.string("key"), "it must be a string"),
        (0, lambda f: f.boolean("key"), "key is 0; it must be true or false"),
        ([True], lambda f: f.integers("key", 0, 3), "a list of at most 3 integers, none below 0"),
        ([1, 2], lambda f: f.integers("key", 0, 1), "a list of at most 1 integers"),
        (["a", 1], lambda f: f.texts("key", 3), "a list of at most 3 strings"),
        ("20/20", lambda f: f.share("key"), r"an exact share in \[0, 1\)"),
        ("1/0", lambda f: f.share("key"), "an exact share"),
        ("0.5", lambda f: f.share("key"), "an exact share"),
        ("9" * 40, lambda f: f.share("key"), "an exact share"),
        ("upper", lambda f: f.match("key", "[A-Z]+", "upper-case letters"), "it must be upper-case letters"),
        ([], lambda f: f.nested("key"), "file: key is a list of 0; it must be a dictionary"),
        ({}, lambda f: f.items("key", 3), "a list of at most 3 dictionaries"),
        ([{}, 3], lambda f: f.items("key", 3), r"file: key\[1\] is 3; it must be a dictionary"),
        (1, lambda f: f.integer("other"), "other is missing; the file may be damaged"),
    ],
)
def test_other_values_are_named(value: Any, read: Callable[[Fields], Any], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message) as caught:
        read(one(value))
    assert len(str(caught.value)) < 200


def test_keys_that_were_not_read_are_an_error() -> None:
    fields = Fields({"a": 1, "b": "x" * 1000}, "file")
    fields.integer("a")
    with pytest.raises(SmartpruneError, match="file: unknown key 'b'; it has: a"):
        fields.reject_unknown_keys()
    fields.string("b")
    fields.reject_unknown_keys()


def test_plain_data_is_copied_and_everything_else_is_refused() -> None:
    data = {"a": [1, 0.5, None, True, "x", ("y",)]}
    copied = plain_data(data, "data")
    assert copied == {"a": [1, 0.5, None, True, "x", ["y"]]}
    assert copied is not data
    for wrong, where in (({"a": {1: 2}}, r"data\.a"), ([math.inf], r"data\[0\]"), ({"a": object()}, r"data\.a"), (b"", "data")):
        with pytest.raises(SmartpruneError, match=f"{where} is .*; it must be plain data"):
            plain_data(wrong, "data")
    deep: Any = 0
    for _ in range(20):
        deep = [deep]
    with pytest.raises(SmartpruneError, match="must be plain data"):
        plain_data(deep, "data")


def test_names_are_short_and_printable() -> None:
    assert is_valid_name("layer.0.weight")
    assert is_valid_name("größe")
    assert not is_valid_name("a\nb")
    assert not is_valid_name("a" * 1001)

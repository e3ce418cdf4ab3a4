"""Fields: reads untrusted plain data key by key, and names the value that is wrong."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from .errors import SmartpruneError

MAX_INTEGER = 2**63 - 1
MAX_TEXT = 1000


class Fields:
    """An untrusted dictionary. Every method checks the type and range of the value that it reads.

    :meth:`reject_unknown_keys` raises if the dictionary has a key that was not read.

    >>> fields = Fields({"blocks": 12, "name": "conv1"}, "receipt")
    >>> fields.integer("blocks"), fields.text("name")
    (12, 'conv1')
    >>> Fields({"blocks": -1}, "receipt").integer("blocks")
    Traceback (most recent call last):
    smartprune.errors.SmartpruneError: receipt: blocks is -1; it must be an integer from 0 to 9223372036854775807
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise SmartpruneError(f"{where} is {_describe(data)}; it must be a dictionary")
        self.data: dict[str, object] = data
        self.where = where
        self._read: set[str] = set()

    def raw(self, key: str) -> object:
        """The value of ``key``, unchecked."""
        self._read.add(key)
        if key not in self.data:
            raise SmartpruneError(f"{self.where}: {key} is missing; the file may be damaged or truncated")
        return self.data[key]

    def error(self, key: str, allowed: str) -> SmartpruneError:
        """The error to raise if the value of ``key`` is not ``allowed``."""
        return SmartpruneError(f"{self.where}: {key} is {_describe(self.data.get(key))}; it must be {allowed}")

    def integer(self, key: str, low: int = 0, high: int = MAX_INTEGER) -> int:
        value = self.raw(key)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def text(self, key: str, max_length: int = MAX_TEXT) -> str:
        """A string of printable characters."""
        value = self.raw(key)
        if not isinstance(value, str) or not is_valid_name(value, max_length):
            raise self.error(key, f"a string of at most {max_length} printable characters")
        return value

    def string(self, key: str) -> str:
        """Any string, of printable characters or not."""
        value = self.raw(key)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.raw(key)
        try:
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                return float(value)
        except OverflowError:  # an integer of 400 digits
            pass
        raise self.error(key, "a number")

    def match(self, key: str, pattern: str, allowed: str) -> str:
        """A string that matches a regular expression."""
        value = self.raw(key)
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise self.error(key, allowed)
        return value

    def boolean(self, key: str) -> bool:
        value = self.raw(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def integers(self, key: str, low: int, max_length: int) -> tuple[int, ...]:
        """A list of at most ``max_length`` integers, none below ``low``."""
        value = self.raw(key)
        if not isinstance(value, list) or len(value) > max_length or any(type(v) is not int or v < low for v in value):
            raise self.error(key, f"a list of at most {max_length} integers, none below {low}")
        return tuple(value)

    def texts(self, key: str, max_length: int) -> tuple[str, ...]:
        """A list of at most ``max_length`` strings of printable characters."""
        value = self.raw(key)
        if (
            not isinstance(value, list)
            or len(value) > max_length
            or not all(isinstance(v, str) and is_valid_name(v) for v in value)
        ):
            raise self.error(key, f"a list of at most {max_length} strings of printable characters")
        return tuple(value)

    def items(self, key: str, max_length: int) -> list[Fields]:
        """A list of at most ``max_length`` dictionaries."""
        value = self.raw(key)
        if not isinstance(value, list) or len(value) > max_length:
            raise self.error(key, f"a list of at most {max_length} dictionaries")
        return [Fields(item, f"{self.where}: {key}[{i}]") for i, item in enumerate(value)]

    def nested(self, key: str) -> Fields:
        """A dictionary."""
        return Fields(self.raw(key), f"{self.where}: {key}")

    def optional(self, key: str) -> Fields | None:
        """A dictionary, or None."""
        return None if self.raw(key) is None else self.nested(key)

    def share(self, key: str = "share") -> Fraction:
        """An exact share in [0, 1), written as ``"19/20"``."""
        allowed = "an exact share in [0, 1) such as '19/20'"
        top, _, bottom = self.match(key, r"\d{1,30}(/\d{1,30})?", allowed).partition("/")
        if int(bottom or 1) == 0 or not 0 <= (share := Fraction(int(top), int(bottom or 1))) < 1:
            raise self.error(key, allowed)
        return share

    def reject_unknown_keys(self) -> None:
        """Raises if the dictionary has a key that was not read."""
        extra = [key for key in self.data if key not in self._read]
        if extra:
            raise SmartpruneError(f"{self.where}: unknown key {_describe(extra[0])}; it has: {', '.join(sorted(self._read))}")


def is_valid_name(text: str, max_length: int = MAX_TEXT) -> bool:
    """Whether the files of this package can store a text as a name."""
    return len(text) <= max_length and text.isprintable()


def plain_data(value: object, where: str, depth: int = 8) -> object:
    """A copy made of None, bool, int, finite float, str, list and dict. Raises for values of other types."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth and isinstance(value, (list, tuple)):
        return [plain_data(item, f"{where}[{i}]", depth - 1) for i, item in enumerate(value)]
    if depth and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain_data(item, f"{where}.{key}", depth - 1) for key, item in value.items()}
    raise SmartpruneError(f"{where} is {_describe(value)}; it must be plain data: numbers, strings, lists and dictionaries")


def _describe(value: object) -> str:
    """A short text for a value of any type and size."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "a huge integer"
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

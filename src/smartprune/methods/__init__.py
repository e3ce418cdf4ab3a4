"""Methods: each one short file, listed here by its lower-case name."""

from typing import Any

from .magnitude import Magnitude
from .method import Method, make, settings
from .smart import Smart

METHODS: dict[str, Any] = {"smart": Smart, "magnitude": Magnitude}

__all__ = ["METHODS", "Magnitude", "Method", "Smart", "make", "settings"]

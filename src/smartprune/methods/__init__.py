"""Pruning methods: one short file each. ``METHODS`` maps lower-case names to them."""

from typing import Any

from .acdc import Acdc
from .awg import Awg
from .gradual import Gradual
from .magnitude import Magnitude
from .method import Capabilities, Method, capabilities, make, settings
from .pas import Pas, find_strength
from .pdp import Pdp
from .smart import Smart

METHODS: dict[str, Any] = {method.name: method for method in (Smart, Magnitude, Gradual, Pdp, Pas, Awg, Acdc)}
"""The methods by their names on the command line. Add an entry to register a method of your own.

Examples:
    >>> import smartprune as sp
    >>> sp.METHODS["gradual"](ramp=0.75)
    Gradual(ramp=0.75, updates=200, norm='mean', through=False)
"""

__all__ = [
    "METHODS",
    "Acdc",
    "Awg",
    "Capabilities",
    "Gradual",
    "Magnitude",
    "Method",
    "Pas",
    "Pdp",
    "Smart",
    "capabilities",
    "find_strength",
    "make",
    "settings",
]

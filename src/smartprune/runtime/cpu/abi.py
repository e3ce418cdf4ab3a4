"""The interface between Python and C: the structures and tables of ``csrc/runtime.h``, and the check that they agree."""

from __future__ import annotations

import ctypes

from ...errors import SmartpruneError

# The tables in runtime.h list the same names in the same order, in capitals.
OPERATIONS = (
    "import",
    "export",
    "conv",
    "depthwise",
    "max_pool",
    "average_pool",
    "mean",
    "unary",
    "affine",
    "add",
    "multiply",
    "copy",
    "shift",
    "upsample",
    "bilinear",
    "gather",
    "softmax",
    "layer_norm",
)
ACTIVATIONS = ("clamp", "silu", "sigmoid", "hardswish", "hardsigmoid", "leaky", "gelu", "tanh", "elu", "gelu_tanh", "mish")
ADDITIONS = ("add_none", "add_before", "add_after")
TYPES = ("float32", "quantum", "float16")

OPERATION = {name: number for number, name in enumerate(OPERATIONS)}
ACTIVATION = {name: number for number, name in enumerate(ACTIVATIONS)}
ADDITION = {name.removeprefix("add_"): number for number, name in enumerate(ADDITIONS)}
FLOAT32, QUANTUM, FLOAT16 = range(len(TYPES))


class Tensor(ctypes.Structure):
    """An activation. Mirrors ``Tensor`` in runtime.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("image", "plane", "row")),
        *((name, ctypes.c_int32) for name in ("images", "blocks", "height", "width", "channels", "type")),
        ("scale", ctypes.c_float),
        ("zero", ctypes.c_float),
    )


_POINTERS = ("group_start", "entry_offset", "weight", "bias", "scale", "initial_sum")
_TILE_POINTERS = ("run", "chunk_start", "x_start", "y_start", "z_start")


class Op(ctypes.Structure):
    """An operation. Mirrors ``Op`` in runtime.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "activation", "addition", "items")),
        *((name, ctypes.c_float) for name in ("low", "high", "slope")),
        ("inner", ctypes.c_int32),
        *((name, Tensor) for name in ("x", "y", "z")),
        *((name, ctypes.c_int32) for name in ("groups", "groups_per_item", "chunks", "lanes")),
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_TILE_POINTERS)),
        *((name, ctypes.c_int32) for name in ("kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw", "flag", "argument")),
    )


class External(ctypes.Structure):
    """A tensor of the caller. Mirrors ``External`` in runtime.h."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("image", "channel", "row", "column")))


class Parts(ctypes.Structure):
    """The parts of a batch. Mirrors ``Parts`` in runtime.h."""

    _fields_ = (
        ("ops", ctypes.c_void_p),
        ("external", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("count", "arenas", "externals", "parts", "images", "together")),
    )


def declare(code: ctypes.CDLL) -> None:
    """Sets the argument and result types of the functions of a library."""
    code.sp_pool_new.restype = ctypes.c_void_p
    code.sp_pool_new.argtypes = (ctypes.c_int,)
    code.sp_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    code.sp_run.restype = None
    code.sp_run_parts.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    code.sp_run_parts.restype = None


def check(code: ctypes.CDLL, file: str) -> None:
    """Raises unless a library has the names and structures of this module.

    Operations are passed as numbers, so a library with other names would compute something else without an error.
    """
    for table, names in (("operations", OPERATIONS), ("activations", ACTIVATIONS), ("additions", ADDITIONS), ("types", TYPES)):
        function = getattr(code, f"sp_{table}", None)
        if function is not None:
            function.restype = ctypes.c_char_p
        compiled = () if function is None else tuple(function().decode().lower().split())
        if compiled != names:
            raise _stale(file, f"its {table} are {', '.join(compiled) or 'missing'}", ", ".join(names))
    for structure in (Tensor, Op, External, Parts):
        size, expected = getattr(code, f"sp_{structure.__name__.lower()}_size")(), ctypes.sizeof(structure)
        if size != expected:
            raise _stale(file, f"its structure {structure.__name__} has {size} bytes", f"{expected} bytes")


def _stale(file: str, problem: str, expected: str) -> SmartpruneError:
    return SmartpruneError(
        f"accelerate: the compiled kernels in {file} do not match this version of smartprune: {problem}, expected {expected}; "
        "the cache is stale: delete this file, so that it is rebuilt, or reinstall smartprune"
    )

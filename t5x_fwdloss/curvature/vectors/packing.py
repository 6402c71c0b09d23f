"""The state of a long computation as plain data and vectors, to save and restore it.

A state is a dataclass. Its fields are packed by their declared types: a `PyTree` is a
vector, which is saved on its own; a NumPy array becomes its shape and its values;
numbers, strings, lists, dictionaries and dataclasses are kept. A field named `like` is
not packed: `unpack` takes it as an argument, a vector with the shapes, types and
shardings of the saved ones.
"""

import collections.abc
import dataclasses
import math
import types
import typing

import numpy as np
from jaxtyping import PyTree

LIKE = "like"
State = typing.TypeVar("State")


def pack(state: typing.Any) -> tuple[dict[str, typing.Any], list[PyTree]]:
    """A state as JSON values (with NumPy's numbers), and its vectors in order.

    Args:
      state: An instance of a dataclass.

    Returns:
      The plain data, which does not change when the state does, and the vectors.
    """
    vectors: list[PyTree] = []
    return _packed(state, type(state), vectors), vectors


def unpack(
    kind: type[State],
    packed: collections.abc.Mapping[str, typing.Any],
    vectors: collections.abc.Iterable[PyTree],
    like: PyTree,
) -> State:
    """The state that `pack` was given, bit for bit.

    Args:
      kind: The class of the state.
      packed: The plain data; a NaN may have become None, as in JSON.
      vectors: The vectors, in order.
      like: A vector with the shapes, types and shardings of all of them.

    Returns:
      The state.
    """
    return _unpacked(packed, kind, iter(vectors), like)


def _fields(kind):
    declared = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    return {name: declared[name] for name in names}


def _optional(kind):
    """The type without None, and whether None was allowed."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (inner,) = [x for x in typing.get_args(kind) if x is not types.NoneType]
        return inner, True
    return kind, False


def _is_array(kind):
    return kind is np.ndarray or getattr(kind, "array_type", None) is np.ndarray


def _packed(value, kind: typing.Any, vectors) -> typing.Any:
    kind, optional = _optional(kind)
    if optional and value is None:
        return None
    if kind is PyTree:
        vectors.append(value)
        return "vector"
    if dataclasses.is_dataclass(kind):
        fields = _fields(kind).items()
        return {
            name: _packed(getattr(value, name), of, vectors)
            for name, of in fields
            if name != LIKE
        }
    if _is_array(kind):
        return {"shape": list(value.shape), "values": value.ravel().tolist()}
    origin, given = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [_packed(x, given[0], vectors) for x in value]
    if origin is dict:
        return {name: _packed(x, given[1], vectors) for name, x in value.items()}
    return value


def _unpacked(value, kind: typing.Any, vectors, like) -> typing.Any:
    kind, optional = _optional(kind)
    if optional and value is None:
        return None
    if kind is PyTree:
        return next(vectors)
    if dataclasses.is_dataclass(kind):
        found = {
            name: like if name == LIKE else _unpacked(value[name], of, vectors, like)
            for name, of in _fields(kind).items()
        }
        make: typing.Any = kind
        return make(**found)
    if _is_array(kind):
        return np.array(value["values"], np.float64).reshape(value["shape"])
    origin, given = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [_unpacked(x, given[0], vectors, like) for x in value]
    if origin is dict:
        return {
            name: _unpacked(x, given[1], vectors, like) for name, x in value.items()
        }
    if kind is float:
        return math.nan if value is None else float(value)
    return value

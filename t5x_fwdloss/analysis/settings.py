"""Checks of settings by their annotations, before any work begins.

An annotation gives a setting's type, and `Annotated` its range, as in
`num_probes: Annotated[int, at_least(2)] = 32`. One checker reads them, for the fields
of measurements and for the arguments of the run scripts, and rejects a wrong one with
one sentence that names it. Annotations that it does not know are not checked.
"""

import collections.abc
import dataclasses
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np

LARGEST_COUNT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on a value that has the right type.

    Attributes:
        words: the condition in words, to follow the type: "of at least 2".
        holds: whether a value fulfills it.
        alone: whether the words include the type.
    """

    words: str
    holds: Callable[[Any], bool]
    alone: bool = False


def at_least(least: int) -> Rule:
    """A number of at least `least`."""
    return Rule(f"of at least {least}", lambda x: x >= least)


def at_most(most: int) -> Rule:
    """A number of at most `most`."""
    return Rule(f"of at most {most}", lambda x: x <= most)


def one_of(*choices: str) -> Rule:
    """One of a few strings."""
    words = f"one of {', '.join(map(repr, choices))}"
    return Rule(words, lambda x: x in choices, alone=True)


Positive = Annotated[int, at_least(1), at_most(LARGEST_COUNT)]
Count = Annotated[int, at_least(0), at_most(LARGEST_COUNT)]
Several = Annotated[int, at_least(2), at_most(LARGEST_COUNT)]
Bytes = Annotated[int, at_least(0), at_most(2**63 - 1)]
Above = Annotated[float, Rule("above 0", lambda x: x > 0)]
Seed = Annotated[int, at_least(0), at_most(2**63 - 1)]
Fraction = Annotated[float, Rule("between 0 and 1", lambda x: 0 < x < 1)]
Pattern = Annotated[
    str,
    Rule("that is not empty", lambda x: bool(x.strip())),
    Rule("that is a regular expression", lambda x: _is_pattern(x)),
]
Words = Annotated[str, Rule("that is not empty", lambda x: bool(x.strip()))]
Path = Annotated[
    str | os.PathLike, Rule("that is not empty", lambda x: bool(os.fspath(x).strip()))
]

# For a setting that may be None at first and is filled in on construction: type
# checkers see its final type.
if typing.TYPE_CHECKING:
    T = typing.TypeVar("T")
    FilledIn = Annotated[T, None]
else:
    FilledIn = typing.Optional


def check(name: str, value: Any, kind: Any) -> None:
    """Passes if a value is of the kind that an annotation describes.

    Args:
        name: name of the setting, as the user writes it.
        value: its value. A bool is not a number, NumPy's numbers are; a float is never
            a whole number; NaN and infinities are not numbers.
        kind: an annotation.

    Raises:
        ValueError: it names the setting, the condition and the value.
    """
    fault = _fault(name, value, kind)
    if fault:
        raise ValueError(fault)


def check_fields(instance: Any, *, macros: Mapping[str, str] | None = None) -> None:
    """Checks every field of a dataclass by its annotation.

    Args:
        instance: an instance of a dataclass.
        macros: if gin binds the fields to macros, those that are not the fields' names
            in capitals. Without it a field is called `Class.field`.

    `ValueError` names the first field whose value does not fit.
    """
    kinds = typing.get_type_hints(type(instance), include_extras=True)
    for field in dataclasses.fields(instance):
        name = f"{type(instance).__name__}.{field.name}"
        if macros is not None:
            name = macros.get(field.name, field.name.upper())
        check(name, getattr(instance, field.name), kinds[field.name])


def check_arguments(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    macros: Mapping[str, str] | None = None,
) -> None:
    """Checks the arguments of a function by its annotations.

    Args:
        function: its parameters are annotated.
        arguments: argument names to values, such as `locals()` at its entry.
        macros: if gin binds the arguments to macros, those that are not the arguments'
            names in capitals.

    `ValueError` names the first argument whose value does not fit.
    """
    kinds = typing.get_type_hints(function, include_extras=True)
    for name in (name for name in kinds if name in arguments):
        said = name if macros is None else macros.get(name, name.upper())
        check(said, arguments[name], kinds[name])


def shown(value: Any) -> str:
    """A value and its type, short enough for an error message."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return f"{value.__name__} itself (in gin, @{value.__name__}() calls it)"
    text = repr(value)
    if len(text) > 80:
        text = f"{text[:77]}..."
    if value is None or isinstance(value, bool):
        return text
    return f"{text} (of type {type(value).__name__})"


def _fault(name, value, kind) -> str | None:
    arms = [_split(arm) for arm in _arms(kind)]
    fitting = [(base, rules) for base, rules in arms if _is(value, base)]
    if not fitting:
        words = [_words(base, rules[:1]) for base, rules in arms]
        return f"{name} must be {' or '.join(words)}: got {shown(value)}."
    base, rules = fitting[0]
    for rule in rules:
        if not rule.holds(value):
            others = ["None"] * any(b is types.NoneType for b, _ in arms)
            words = " or ".join([_words(base, [rule]), *others])
            return f"{name} must be {words}: got {value!r}."
    parts = (_fault(*part) for part in _parts(name, value, base))
    return next((fault for fault in parts if fault), None)


def _arms(kind) -> list[Any]:
    """The alternatives of a union, rules around it given to each."""
    base, rules = _split(kind)
    if typing.get_origin(base) in (typing.Union, types.UnionType):
        found = [arm for one in typing.get_args(base) for arm in _arms(one)]
        return [Annotated[arm, *rules] if rules else arm for arm in found]
    return [kind]


def _split(kind) -> tuple[Any, list[Rule]]:
    if typing.get_origin(kind) is not Annotated:
        return (types.NoneType if kind is None else kind), []
    base, *extras = typing.get_args(kind)
    return base, [rule for rule in extras if isinstance(rule, Rule)]


def _parts(name, value, kind):
    """The entries of a list or dictionary: name, value, annotation."""
    arguments = typing.get_args(kind)
    if not arguments:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"a name in {name}", key, arguments[0]
            yield f"{name}[{key!r}]", item, arguments[1]
    elif is_list(value):
        for number, item in enumerate(value):
            yield f"{name}[{number}]", item, arguments[0]


def _is(value, kind) -> bool:
    origin = typing.get_origin(kind) or kind
    if origin in _TYPES:
        return _TYPES[origin].holds(value)
    if origin is Any or not isinstance(origin, type):
        return True
    return isinstance(value, origin)


def _words(kind, rules) -> str:
    if rules and rules[0].alone:
        return rules[0].words
    origin = typing.get_origin(kind) or kind
    known = _TYPES.get(origin)
    words = known.words if known else f"an instance of {origin.__name__}"
    return " ".join([words, *(rule.words for rule in rules)])


def _is_number(value) -> bool:
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _is_pattern(value) -> bool:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _is_whole(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_list(value: Any) -> bool:
    """Whether a value is a sequence or an array, but not a string."""
    listed = isinstance(value, collections.abc.Sequence | np.ndarray)
    return listed and not isinstance(value, str | bytes)


_TYPES = {
    int: Rule("a whole number", _is_whole),
    float: Rule("a finite number", _is_number),
    bool: Rule("True or False", lambda x: isinstance(x, bool | np.bool_)),
    str: Rule("a string", lambda x: isinstance(x, str)),
    types.NoneType: Rule("None", lambda x: x is None),
    os.PathLike: Rule("a path", lambda x: isinstance(x, os.PathLike)),
    collections.abc.Sequence: Rule("a list", is_list),
    collections.abc.Mapping: Rule("a dictionary", lambda x: isinstance(x, Mapping)),
    collections.abc.Callable: Rule("a function", callable),
}

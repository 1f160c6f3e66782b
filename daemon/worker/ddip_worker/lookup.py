# SPDX-License-Identifier: Apache-2.0
"""Looks at objects while a cell may be at work with them: attributes and short texts.

No property and no repr runs for it: a property may take part in a collective that the other ranks
know nothing of, and a repr may wait for a GPU or take minutes.
"""

import builtins
import dataclasses
import datetime
import functools
import inspect
import itertools
import pathlib
import types

import torch

TEXT_MAX = 200  # characters
_ITEMS, _LEVELS, _DIGITS = 8, 3, 1000
# Their properties compute, they do not communicate.
_TRUSTED = ("numpy", "pandas", "scipy", "fastai", "fastcore")
_BINDS = (
    types.FunctionType,
    classmethod,
    staticmethod,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_PLAIN = (
    float,
    complex,
    range,
    slice,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    pathlib.PurePath,
    torch.dtype,
    torch.device,
    torch.Size,
)
_BRACKETS = {list: "[]", tuple: "()", set: "{}", frozenset: "{}", dict: "{}"}


def resolve(names, dotted):
    """(parent or None, object) of `a.b.c`. Raises AttributeError, NameError."""
    first, *rest = dotted.split(".")
    try:
        parent, found = None, names[first] if first in names else vars(builtins)[first]
    except KeyError:
        raise NameError(first) from None
    for name in rest:
        if isinstance(found, (property, functools.cached_property)):
            raise AttributeError(f"{dotted}: the value of a property is not computed")
        parent, found = found, attribute(found, name)
    return parent, found


def attribute(obj, name):
    """obj.name; a property is found as itself where it is not known to be harmless."""
    if isinstance(obj, torch.nn.Module):
        for store in ("_modules", "_parameters", "_buffers"):
            if name in obj.__dict__.get(store, ()):
                return obj.__dict__[store][name]
    if isinstance(obj, types.ModuleType):  # no lazy import
        return vars(obj)[name] if name in vars(obj) else _missing(obj, name)
    found = inspect.getattr_static(obj, name)
    if isinstance(found, property):
        return getattr(obj, name) if _harmless(type(obj), name) else found
    own = obj if isinstance(obj, type) else _dict(obj)
    if not isinstance(found, _BINDS) or (own is not obj and name in own):
        return found
    return found.__get__(None, obj) if own is obj else found.__get__(obj, type(obj))


def _missing(obj, name):
    raise AttributeError(f"{obj.__name__} has no attribute {name!r}")


def _dict(obj):
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}


def _harmless(kind, name):
    owner = next((c for c in kind.__mro__ if name in vars(c)), kind)
    return str(owner.__module__).partition(".")[0] in _TRUSTED


def peek(obj, name):
    """The value of an attribute, None where it would have to be computed or is not there."""
    try:
        found = attribute(obj, name)
    except Exception:
        return None
    return None if isinstance(found, (property, functools.cached_property)) else found


def form(value):
    """{shape, dtype, device, size_bytes} of an array, each None where there is none."""
    if isinstance(value, type):
        return dict.fromkeys(("shape", "dtype", "device", "size_bytes"))
    shape, size = peek(value, "shape"), peek(value, "nbytes")
    dtype, device = peek(value, "dtype"), peek(value, "device")
    return {
        "shape": list(shape) if isinstance(shape, tuple) else None,
        "dtype": str(dtype) if _is_dtype(dtype) else None,
        "device": str(device) if isinstance(device, (str, torch.device)) else None,
        "size_bytes": size if isinstance(size, int) else None,
    }


def _is_dtype(found):
    return isinstance(found, (str, torch.dtype)) or type(found).__module__.startswith(
        ("numpy", "pandas")
    )


def brief(value):
    """At most TEXT_MAX characters about a value, None if its own repr would have to say it."""
    text = _brief(value, _LEVELS)
    if text is None or len(text) <= TEXT_MAX:
        return text
    return text[: TEXT_MAX - 3] + "..."


def _brief(value, levels):
    kind = type(value)
    if value is None or kind is bool or kind in _PLAIN or isinstance(value, pathlib.PurePath):
        return repr(value)
    if kind is int:
        return (
            repr(value) if value.bit_length() < _DIGITS else f"<int of {value.bit_length()} bits>"
        )
    if kind in (str, bytes):
        return repr(value[:TEXT_MAX])
    if kind in _BRACKETS:
        return _container(value, kind, levels - 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own, parts = _dict(value), []
        for field in dataclasses.fields(value)[:_ITEMS]:
            parts.append(f"{field.name}={_part(own.get(field.name), levels - 1)}")
        return f"{kind.__qualname__}({', '.join(parts)})"
    return None


def _container(value, kind, levels):
    left, right = _BRACKETS[kind]
    if not value:
        return repr(value)
    if levels < 0:
        return f"{left}...{right}"
    some = list(_first(value.items() if kind is dict else value))
    parts = (
        [": ".join(_part(x, levels) for x in item) for item in some]
        if kind is dict
        else [_part(item, levels) for item in some]
    )
    if len(value) > len(some):
        parts.append("...")
    inner = ", ".join(parts) + ("," if kind is tuple and len(value) == 1 else "")
    return f"frozenset({left}{inner}{right})" if kind is frozenset else f"{left}{inner}{right}"


def _first(items):
    try:
        yield from itertools.islice(items, _ITEMS)
    except RuntimeError:  # the cell changes it
        return


def _part(value, levels):
    text = _brief(value, levels)
    return f"<{type(value).__name__}>" if text is None else text

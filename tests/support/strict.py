"""Check every signature of ours at each call: shapes by jaxtyping, the rest by beartype.

jaxtyping's own hook is slow in a large suite: it builds the checks of all functions at import, and binds the arguments
of every call. Here a check is built at the first call, and jaxtyping checks only signatures that have shapes.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import flax.struct
import jaxtyping

Check = Callable[[Any], Any]

# frameworks recognise such functions by these flags, which a wrapper does not have
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_jaxtyped, _struct_dataclass = jaxtyping.jaxtyped, flax.struct.dataclass


def install() -> None:
    """Check the signatures of all modules of ours that are imported from now on."""
    flax.struct.dataclass = _unchecked_dataclass
    jaxtyping.jaxtyped = _strictly
    jaxtyping.install_import_hook(["peagle", "target", "drafter"], "beartype.beartype")


def _unchecked_dataclass(*args: Any, **kwargs: Any) -> Any:
    """Call flax.struct.dataclass, and exempt __init__: JAX rebuilds pytrees with leaves that are not arrays."""
    result = _struct_dataclass(*args, **kwargs)
    if isinstance(result, type):
        result.__no_type_check__ = True  # type: ignore[attr-defined]
    return result


def _strictly(*, typechecker: Check) -> Check:
    """Stand in for jaxtyping.jaxtyped, the decorator of every function and class of ours."""

    def check(function: Any) -> Any:
        shapes = any(map(_may_hold_a_shape, function.__annotations__.values()))
        return _jaxtyped(function, typechecker=typechecker) if shapes else typechecker(function)

    def decorate(function_or_class: Any) -> Any:
        if inspect.isfunction(function_or_class):
            return _at_first_call(check, function_or_class)
        own = vars(function_or_class).get("__init__") if dataclasses.is_dataclass(function_or_class) else None
        exempt = hasattr(own, "__wrapped__") or getattr(function_or_class, "__no_type_check__", False)
        if own is not None and not exempt:
            function_or_class.__init__ = _at_first_call(check, own)
        return function_or_class

    return decorate


def _may_hold_a_shape(hint: Any) -> bool:
    """Whether an annotation is jaxtyping's, or has one in it; a string may name anything."""
    if isinstance(hint, str) or (isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)):
        return True
    parts = () if get_origin(hint) is Literal else hint if isinstance(hint, list) else get_args(hint)
    return any(map(_may_hold_a_shape, parts))


def _at_first_call(check: Check, function: Any) -> Any:
    """Build a function's check at its first call. Functions within functions, made at every call, have none."""
    if not function.__annotations__ or "<locals>" in function.__qualname__:
        return function
    if function.__code__.co_flags & _SUSPENDED:
        return check(function)
    checked: Any = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if checked is None:
            checked = check(function)
        return checked(*args, **kwargs)

    return call

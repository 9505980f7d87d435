"""The object that `load(model)` gives back: the user's module with another way to run when it is called.

`torch.compile(model)` gives a module around the module: names in its `state_dict` get a prefix,
`model.generate(...)` and every other method run the original, and `.eval()` on one is not seen by
the other. A `Loaded` is of the user's own class (a subclass made for this one instance) and *is* the
user's instance in all but its `__call__`: both have the same `__dict__`, so that parameters, buffers,
submodules, hooks, `training` and plain attributes are one and the same, whoever changes them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_OUTER = (
    "autokernel: the loaded model is being traced by an outer torch.compile, which leaves the package's kernels out; "
    "compile the model itself with torch.compile(model, backend=PACKAGE.backend()) instead, or call the loaded model outside"
)


class _NoRegistration:
    """Stands before the user's class, whose `__init_subclass__` may fill registries: this is no new model."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def original(model: Any) -> Any:
    """The user's model below what `load`, `torch.compile` or `torch.export` made of it."""
    while True:
        if isinstance(model, nn.Module) and "_autokernel_original" in type(model).__dict__:
            model = type(model)._autokernel_original
        elif "_autokernel_original" in getattr(model, "__dict__", ()):
            model = model._autokernel_original
        elif isinstance(model, torch._dynamo.OptimizedModule):
            warnings.warn("autokernel: the model was under torch.compile already; the package takes the place of that", stacklevel=4)
            model = model._orig_mod
        elif isinstance(model, torch.export.ExportedProgram):
            model = model.module()
        else:
            return model


def wrap(model: Any, compiled: Callable[..., Any], report: Callable[[], Any], again: Callable[[Any], Any]) -> Any:
    """`model` with calls going to `compiled`. `again(copy)` loads a copy of the model in the same way."""
    if not isinstance(model, nn.Module):
        call = _watching(model, compiled)
        call.autokernel_report, call._autokernel_original = report, model
        return call

    watched = _watching(model, compiled)
    user_class = type(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return watched(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The memo knows the copy by the original: what else refers to the original then finds one copy.
        return again(copy.deepcopy(model, memo))

    def __reduce_ex__(self, protocol: int) -> Any:
        # What is saved is the user's model, of a class that can be found again, and needs no package to be read.
        return copy.copy, (model,)

    members = {
        "__call__": __call__,
        "__deepcopy__": __deepcopy__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": user_class.__module__,
        "__qualname__": user_class.__qualname__,
        "__doc__": user_class.__doc__,
        "_autokernel_original": model,
        "autokernel_report": staticmethod(report),
    }
    try:
        made = type(user_class)(user_class.__name__, (_NoRegistration, user_class), members)
        loaded = object.__new__(made)
        object.__setattr__(loaded, "__dict__", vars(model))
    except TypeError:
        # Slots, a sealed class, a metaclass with a mind of its own: then PyTorch's own module around the module.
        object.__setattr__(compiled, "autokernel_report", report)
        return compiled
    return loaded


def compilable(model: Any) -> Any:
    """What to hand to `torch.compile`: `model.compile()` would otherwise take every call before we see it."""
    in_place = isinstance(model, nn.Module) and getattr(model, "_compiled_call_impl", None) is not None
    if in_place:
        warnings.warn("autokernel: model.compile() was called on the model; the loaded model runs the package in place of that", stacklevel=4)
    return model._call_impl if in_place else model


def _watching(model: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, but under an outer trace the original with a warning: Dynamo would drop ours silently."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _warn_outer()
            return model(*args, **kwargs)
        return compiled(*args, **kwargs)

    return call


@torch.compiler.assume_constant_result
def _warn_outer() -> int:
    """Runs while a graph is traced and leaves no trace in it."""
    warnings.warn(_OUTER, stacklevel=2)
    return 0

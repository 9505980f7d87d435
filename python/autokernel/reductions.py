"""Mutants of operators that reduce: the end not read, sums in few digits, and shortcuts that are right only on kind data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .precision import LOWER, rounded

NodeCall = Callable[[Any, list[Any], dict[str, Any]], Any]
Found = tuple[str, str, NodeCall]

_PLAIN = frozenset("sum mean amax amin var var_mean std std_mean linalg_vector_norm norm logsumexp prod max min argmax argmin any all".split())
_SUMS = frozenset("sum mean linalg_vector_norm".split())
# The operands whose last and second-last dimensions are summed over.
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}

# Partial sums in a chain that is kept in few digits. Shorter chains of 16-bit types are what honest kernels do.
_STEPS = 64
_LONG = 256


def cuts(node: dict[str, Any], name: str, bits: int) -> Iterator[Found]:
    """``(kind, what, call)`` for a node, ``bits`` being the digits of the region's outputs."""
    if name in _PLAIN:
        for label, tail in _TAILS.items():
            yield "cut", f"{label} not read", _skipping(tail)
            if name == "mean":
                yield "cut", f"{label} not summed but counted", _skipping(tail, counted=True)
        if name in _SUMS:
            for lower in LOWER[bits]:
                yield "accumulation", f"summed in {lower} bits", _chained(name, lower, 0 if bits > 11 else _LONG)
        if name in ("var", "var_mean"):
            yield "shortcut", "the mean of squares less the squared mean", _one_pass
    elif name in ("_softmax", "_log_softmax"):
        for label, tail in _TAILS.items():
            yield "cut", f"{label} not summed", _softmax(name, tail)
        yield "shortcut", "no largest value subtracted", _softmax(name, None)
    elif name == "native_layer_norm":
        for label, tail in _TAILS.items():
            yield "cut", f"statistics without {label}", _layer_norm(tail)
        yield "shortcut", "the mean of squares less the squared mean", _layer_norm(None)
    elif name in _PRODUCTS:
        for label, tail in _TAILS.items():
            yield "cut", f"{label} not summed", _product(_PRODUCTS[name], tail)
        if bits > 11:
            for lower in LOWER[bits]:
                yield "accumulation", f"summed in {lower} bits", _chained_product(_PRODUCTS[name], lower)


class Unsuited(Exception):
    """The change does not exist for these shapes."""


# How many of ``k`` elements are at the end.
_TAILS: dict[str, Callable[[int], int]] = {
    "the last element": lambda k: 1,
    "the last 1 %": lambda k: k // 100 if k >= 200 else 0,
    "the last tile": lambda k: k % 16 or 16,
}


def _cut(k: int, tail: Callable[[int], int]) -> int:
    count = tail(k)
    if not 0 < count < k or (count == 1 and tail is not _TAILS["the last element"]):
        raise Unsuited
    return k - count


def _arguments(function: Any, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [a.name for a in function._schema.arguments]
    return {**dict(zip(names, args)), **kwargs}


def _dims(function: Any, args: list[Any], kwargs: dict[str, Any]) -> list[int]:
    """The reduced dimensions, ascending; all where none is named."""
    dim, rank = _arguments(function, args, kwargs).get("dim"), args[0].dim()
    given = range(rank) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    dims = sorted(d % max(rank, 1) for d in given)
    if not dims or rank == 0:
        raise Unsuited
    return dims


def _skipping(tail: Callable[[int], int], counted: bool = False) -> NodeCall:
    def call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        x, last = args[0], _dims(function, args, kwargs)[-1]
        kept = _cut(x.shape[last], tail)
        result = function(x.narrow(last, 0, kept), *args[1:], **kwargs)
        return result * (kept / x.shape[last]) if counted else result

    return call


def _chained(name: str, bits: int, least: int) -> NodeCall:
    def call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        given, dims = _arguments(function, args, kwargs), _dims(function, args, kwargs)
        x, last = args[0], dims[-1]
        if x.shape[last] < max(least, 2) or given.get("ord", 2) != 2:
            raise Unsuited
        terms = (x.square() if name == "linalg_vector_norm" else x).to(kwargs.get("dtype") or x.dtype)
        total = None
        for part in terms.tensor_split(min(x.shape[last], _STEPS), last):
            step = part.sum(last, keepdim=True)
            total = rounded(step if total is None else total + step, bits)
        like = function(*args, **kwargs)
        total = total.sum(dims, keepdim=True) if len(dims) > 1 else total
        if name == "mean":
            total = total * (like.numel() / x.numel())
        return (total.sqrt() if name == "linalg_vector_norm" else total).reshape(like.shape).to(like.dtype)

    return call


def _one_pass(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    given, dims, x = _arguments(function, args, kwargs), _dims(function, args, kwargs), args[0]
    keep, count = bool(given.get("keepdim")), 1
    for d in dims:
        count *= x.shape[d]
    correction = given.get("correction", given.get("unbiased", 1))
    correction = 1 if correction is None else float(correction)
    mean = x.mean(dims, keepdim=keep)
    var = ((x * x).mean(dims, keepdim=keep) - mean * mean).clamp(min=0) * (count / max(count - correction, 1e-9))
    return (var, mean) if "var_mean" in function._schema.name else var


def _softmax(name: str, tail: Callable[[int], int] | None) -> NodeCall:
    def call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        like = function(*args, **kwargs)
        x, dim = args[0].to(like.dtype), args[1]
        # In half precision e^x itself would overflow, which nobody writes.
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        kept = x.shape[dim] if tail is None else _cut(x.shape[dim], tail)
        shifted = x if tail is None else x - x.narrow(dim, 0, kept).amax(dim, keepdim=True)
        total = shifted.exp().narrow(dim, 0, kept).sum(dim, keepdim=True)
        return (shifted.exp() / total if name == "_softmax" else shifted - total.log()).to(like.dtype)

    return call


def _layer_norm(tail: Callable[[int], int] | None) -> NodeCall:
    def call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        out, *rest = function(*args, **kwargs)
        x, shape, weight, bias, eps = args
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        dims = tuple(range(-len(shape), 0))
        if tail is None:
            mean = x.mean(dims, keepdim=True)
            var = (x * x).mean(dims, keepdim=True) - mean * mean
        else:
            head = x.narrow(-1, 0, _cut(x.shape[-1], tail))
            var, mean = torch.var_mean(head, dims, correction=0, keepdim=True)
        y = (x - mean) * torch.rsqrt(var + eps)
        y = y if weight is None else y * weight
        return ((y if bias is None else y + bias).to(out.dtype), *rest)

    return call


def _product(positions: tuple[int, int], tail: Callable[[int], int]) -> NodeCall:
    def call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        left, right = (args[p] for p in positions)
        kept, args = _cut(left.shape[-1], tail), list(args)
        args[positions[0]], args[positions[1]] = left.narrow(-1, 0, kept), right.narrow(-2, 0, kept)
        return function(*args, **kwargs)

    return call


def _chained_product(positions: tuple[int, int], bits: int) -> NodeCall:
    def call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        left, right = (args[p] for p in positions)
        total = None
        for a, b in zip(left.tensor_split(16, -1), right.tensor_split(16, -2)):
            step = a @ b
            total = rounded(step if total is None else total + step, bits)
        if positions[0] == 1:
            total = total * kwargs.get("alpha", 1) + args[0] * kwargs.get("beta", 1)
        return total

    return call

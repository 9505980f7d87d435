"""An fx graph of ATen operators as ``autokernel.graph/1``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from . import tensors
from .region import operator_name

SCHEMA = "autokernel.graph/1"
_I64 = range(-(1 << 63), 1 << 63)


def encode(value: Any, ref: Callable[[fx.Node], Any]) -> Any:
    """One argument in its wire form; ``ref`` gives the payload of a reference to a node."""
    if isinstance(value, fx.Node):
        return {"ref": ref(value)}
    if value is None:
        return "none"
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int) and value in _I64:
        return {"int": value}
    if isinstance(value, float):
        return {"float": value if math.isfinite(value) else str(value)}
    if isinstance(value, torch.dtype) and value in tensors.NAMES:
        return {"dtype": tensors.NAMES[value]}
    if isinstance(value, str):
        return {"str": value}
    if isinstance(value, (list, tuple)):
        return {"list": [encode(item, ref) for item in value]}
    # slices, devices, layouts, memory formats, symbols
    return {"opaque": str(value) if not isinstance(value, torch.device) else repr(value)}


def value_of(node: fx.Node, gm: fx.GraphModule | None = None) -> Any:
    """What a node produces: ``{"tensor": meta}``, ``{"tuple": [meta or None]}`` or ``"other"``."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr" and gm is not None:
        value = attribute(gm, str(node.target))
    if isinstance(value, torch.Tensor):
        described = tensors.meta(value)
        return "other" if described is None else {"tensor": described}
    if isinstance(value, (list, tuple)):
        return {"tuple": [tensors.meta(item) if isinstance(item, torch.Tensor) else None for item in value]}
    return "other"


def attribute(gm: fx.GraphModule, path: str) -> Any:
    """What a graph module holds under a dotted name."""
    found: Any = gm
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


_KINDS = {"placeholder": "placeholder", "call_function": "call", "get_attr": "get_attr", "output": "output"}


def to_json(gm: fx.GraphModule, constant: Sequence[bool]) -> dict[str, Any]:
    """The whole graph; ``constant[i]`` says whether placeholder ``i`` is a parameter or buffer."""
    nodes = []
    flags = iter(constant)
    for node in gm.graph.nodes:
        kind = _KINDS.get(node.op)
        if kind is None:
            raise ValueError(f"node {node.name} is a {node.op}, which no functional ATen graph holds")
        described = {
            "name": node.name,
            "kind": kind,
            "target": "output" if kind == "output" else operator_name(node.target),
            "args": [],
            "kwargs": [],
            "value": "other" if kind == "output" else value_of(node, gm),
        }
        if kind == "output":
            results = node.args[0]
            results = results if isinstance(results, (list, tuple)) else [results]
            described["args"] = [encode(item, _name) for item in results]
        elif kind == "call":
            described["args"] = [encode(arg, _name) for arg in node.args]
            described["kwargs"] = [[key, encode(arg, _name)] for key, arg in node.kwargs.items()]
        if kind == "placeholder":
            described["constant"] = next(flags, False)
        elif kind == "get_attr" and described["value"] != "other":
            # A tensor that the graph itself holds never changes.
            described["constant"] = True
        nodes.append(described)
    return {"schema": SCHEMA, "nodes": nodes}


def _name(node: fx.Node) -> str:
    return node.name

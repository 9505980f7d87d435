"""A region's JSON as something that runs, in its own element types or widened to fp64."""

from __future__ import annotations

import copy
import math
import operator as python_operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .tensors import DTYPES, FLOATS

_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DEVICE = re.compile(r"device\(type='(\w+)'(?:, index=(\d+))?\)")

# Results of these jump when their operand moves a little: two honest kernels may differ by a whole step.
_JUMPS = frozenset(
    "eq ne lt le gt ge round floor ceil trunc fix sign sgn heaviside argmax argmin topk sort argsort kthvalue median "
    "mode bucketize searchsorted unique nonzero floor_divide fmod remainder frac logical_and logical_or logical_not "
    "logical_xor isnan isinf isfinite signbit max_pool2d_with_indices".split()
)
# Their positional argument or keyword asks for a wider result of a narrow operand; fp64 has no such form.
_HALF_TO_FLOAT = frozenset({"aten._softmax.default", "aten._log_softmax.default"})


def operator(name: str) -> Any:
    """``aten.mul.Tensor`` is the overload of that name, ``getitem`` is Python's."""
    if name == "getitem":
        return python_operator.getitem
    namespace, *path, overload = name.split(".")
    found = getattr(torch.ops, namespace)
    for part in path:
        found = getattr(found, part)
    return getattr(found, overload)


def operator_name(target: Any) -> str:
    """The inverse of ``operator``; what has no such name is described, and stays opaque."""
    if target is python_operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if isinstance(target, str):
        return target
    return f"python.{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _opaque(text: str) -> Any:
    if match := _DEVICE.fullmatch(text):
        return torch.device(match[1], int(match[2]) if match[2] else None)
    if re.fullmatch(r"torch\.(strided|sparse_coo|(contiguous|channels_last|channels_last_3d|preserve)(_format)?)", text):
        return getattr(torch, text.removeprefix("torch."))
    if re.fullmatch(r"torch\.(u?int\d+|float\w+|complex\d+|uint8)", text):
        return getattr(torch, text.removeprefix("torch."))
    raise ValueError(f"an opaque argument has no value outside its graph: {text}")


def decode(arg: Any, ref: Callable[[Any], Any]) -> Any:
    """A wire argument as a Python value; ``ref`` resolves the payload of ``{"ref": payload}``."""
    if arg == "none":
        return None
    (kind, value), = arg.items()
    if kind == "ref":
        return ref(value)
    if kind == "list":
        return [decode(item, ref) for item in value]
    if kind == "dtype":
        return DTYPES[value]
    if kind == "float":
        return _WORDS[value] if isinstance(value, str) else float(value)
    if kind == "opaque":
        return _opaque(value)
    if kind in ("int", "bool", "str"):
        return value
    raise ValueError(f"unknown kind of argument: {kind}")


def operands(arg: Any) -> list[dict[str, int]]:
    """What a wire argument refers to: inputs and nodes."""
    if not isinstance(arg, dict):
        return []
    if "ref" in arg:
        return [arg["ref"]]
    return [operand for item in arg.get("list", []) for operand in operands(item)]


def arguments(node: dict[str, Any]) -> list[Any]:
    """Positional arguments and keywords of a node."""
    return [*node["args"], *(arg for _, arg in node["kwargs"])]


Call = Callable[[int, Any, list[Any], dict[str, Any]], Any]


def plain(_node: int, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operator as it stands in the region."""
    return function(*args, **kwargs)


def run(
    region: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    before: Callable[[int], None] = lambda _node: None,
    call: Call = plain,
    first: int = 0,
    values: dict[int, Any] | None = None,
) -> list[torch.Tensor]:
    """Runs it eagerly, one operator after the other; a value lives until its last reader.

    ``before`` hears the number of each node that is about to run, ``call`` calls it. Goes on at node
    ``first`` where ``values`` holds those of the nodes before it, as ``walk`` left them."""
    values = {} if values is None else values
    for node in walk(region, tensors, values, call, first):
        before(node)
    return [values[i] for i in region["outputs"]]


def walk(
    region: dict[str, Any], tensors: Sequence[torch.Tensor], values: dict[int, Any], call: Call = plain, first: int = 0
) -> Iterator[int]:
    """Runs it node by node and stops before each. ``values`` then holds what this and later nodes read, and
    in the end the outputs."""
    nodes, outputs = region["nodes"], region["outputs"]
    last = {
        operand["node"]: i
        for i, node in enumerate(nodes)
        for arg in arguments(node)
        for operand in operands(arg)
        if "node" in operand
    }

    def ref(operand: dict[str, int]) -> Any:
        return tensors[operand["input"]] if "input" in operand else values[operand["node"]]

    for i, node in enumerate(nodes[first:], first):
        yield i
        with torch.no_grad():
            args = [decode(arg, ref) for arg in node["args"]]
            kwargs = {key: decode(arg, ref) for key, arg in node["kwargs"]}
            values[i] = call(i, operator(node["op"]), args, kwargs)
            del args, kwargs
            for done in [k for k in values if last.get(k, -1) <= i and k not in outputs and (k != i or k not in last)]:
                del values[done]


def to_graph_module(region: dict[str, Any]) -> fx.GraphModule:
    """The region as a graph: placeholders ``in0``, ``in1``, ...; returns a tuple of the outputs."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"in{i}") for i in range(len(region["inputs"]))]
    nodes: list[fx.Node] = []

    def ref(operand: dict[str, int]) -> fx.Node:
        return inputs[operand["input"]] if "input" in operand else nodes[operand["node"]]

    for node in region["nodes"]:
        args = tuple(decode(arg, ref) for arg in node["args"])
        kwargs = {key: decode(arg, ref) for key, arg in node["kwargs"]}
        nodes.append(graph.call_function(operator(node["op"]), args, kwargs))
    graph.output(tuple(nodes[i] for i in region["outputs"]))
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Region")


def widen(region: dict[str, Any]) -> dict[str, Any]:
    """The same region computed in fp64: float element types of values and arguments become f64.

    Casts to integers and bool stay: they are part of the function. A cast to another float type
    is rounding, and so part of what a kernel may do differently. Raises ``ValueError`` where an
    operator has no meaning in fp64.
    """
    wide = copy.deepcopy(region)
    for entry in wide["inputs"]:
        _widen_meta(entry["meta"])
    for node in wide["nodes"]:
        if node["op"].startswith("aten.view.dtype"):
            raise ValueError("the bits of a float are read as another type: this has no fp64 form")
        node["args"] = [_widen_arg(arg) for arg in node["args"]]
        node["kwargs"] = [[key, _widen_arg(arg)] for key, arg in node["kwargs"]]
        if node["op"] in _HALF_TO_FLOAT:
            node["args"][2:3] = [{"bool": False}] if len(node["args"]) > 2 else []
            node["kwargs"] = [[key, {"bool": False} if key == "half_to_float" else arg] for key, arg in node["kwargs"]]
        if isinstance(node["value"], dict):
            for meta in [node["value"]["tensor"]] if "tensor" in node["value"] else node["value"]["tuple"]:
                if meta is not None:
                    _widen_meta(meta)
        _widen_factory(node)
    return wide


def _widen_meta(meta: dict[str, Any]) -> None:
    if meta["dtype"] in FLOATS:
        meta["dtype"] = "f64"


def _widen_arg(arg: Any) -> Any:
    if isinstance(arg, dict):
        if arg.get("dtype") in FLOATS:
            return {"dtype": "f64"}
        if "list" in arg:
            return {"list": [_widen_arg(item) for item in arg["list"]]}
    return arg


def _widen_factory(node: dict[str, Any]) -> None:
    """A tensor made from nothing takes the default dtype where none is asked for; ask for fp64."""
    made_of_nothing = not any(operands(arg) for arg in arguments(node))
    value = node["value"]
    if made_of_nothing and isinstance(value, dict) and value.get("tensor", {}).get("dtype") == "f64":
        if all(key != "dtype" for key, _ in node["kwargs"]):
            node["kwargs"].append(["dtype", {"dtype": "f64"}])


def jumps(region: dict[str, Any]) -> list[str]:
    """The operators whose results jump, and casts of floats to whole numbers."""
    found = []
    for node in region["nodes"]:
        name = node["op"].split(".")[1] if "." in node["op"] else node["op"]
        asked = [arg["dtype"] for arg in arguments(node) if isinstance(arg, dict) and "dtype" in arg]
        if name in _JUMPS or (name in ("_to_copy", "to") and any(dtype not in FLOATS for dtype in asked)):
            found.append(node["op"])
    return found

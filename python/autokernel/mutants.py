"""Wrong forms of a region, derived from its graph: what a check of its outputs must be able to tell from it.

A mutant is the region with one thing changed: an operator left out, an operand lost or exchanged, a constant
changed, a reduction cut short, digits dropped, a function replaced by a cheaper one, an output filled with
something plausible. Each runs in the region's own element types, as a kernel would, and in fp64, which says
whether it is another function at all. Nothing here decides anything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import reductions
from .precision import BITS, LOWER, rounded
from .region import operands
from .tensors import DTYPES, FLOATS

Change = Callable[[torch.Tensor], torch.Tensor]
NodeCall = Callable[[Any, list[Any], dict[str, Any]], Any]


@dataclass
class Known:
    """What a mutant of the outputs may look at."""

    inputs: Sequence[torch.Tensor]
    right: Sequence[torch.Tensor]
    """The region's own outputs on these inputs."""
    others: Sequence[Sequence[torch.Tensor]]
    """Its outputs on other inputs."""


@dataclass(frozen=True)
class Mutant:
    """One change. Exactly one of ``call``, ``inputs`` and ``outputs`` is there."""

    kind: str
    name: str
    node: int | None = None
    call: NodeCall | None = None
    inputs: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = field(default=None)
    outputs: Callable[[Known], list[torch.Tensor]] | None = None


def plan(region: dict[str, Any], most: int, seed: int) -> list[Mutant]:
    """At most ``most`` mutants, as many kinds and places as there are, so that any first part of them is a fair
    sample; the same ones for equal arguments."""
    bits = min((BITS[d] for d in _output_types(region) if d in BITS), default=24)
    found = [m for i, node in enumerate(region["nodes"]) for m in _of_node(region, i, node, bits)]
    found += [m for i, entry in enumerate(region["inputs"]) for m in _of_input(i, entry["meta"], bits)]
    found += _of_outputs(region, bits)
    # In turns over the kinds, so that a long graph does not crowd out what every region has.
    order = random.Random(seed)
    order.shuffle(found)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in found:
        kinds.setdefault(mutant.kind, []).append(mutant)
    turns = (group[i] for i in range(len(found)) for group in kinds.values() if i < len(group))
    return [m for _, m in zip(range(most), turns)]


def _output_types(region: dict[str, Any]) -> list[torch.dtype]:
    metas = (_meta(region["nodes"][i]["value"]) for i in region["outputs"])
    return [DTYPES[meta["dtype"]] for meta in metas if meta]


def _meta(value: Any) -> dict[str, Any] | None:
    """Description of a value's (first) tensor."""
    if not isinstance(value, dict):
        return None
    return value.get("tensor") or next(iter(value.get("tuple") or ()), None)


# ---- one node

# Places, copies and choices of storage: what they get wrong, mutants of the inputs show.
_QUIET = frozenset(
    "view _unsafe_view reshape expand permute transpose t unsqueeze squeeze slice select split split_with_sizes chunk clone alias "
    "detach contiguous getitem _to_copy to unbind narrow as_strided lift_fresh_copy full zeros ones empty arange scalar_tensor "
    "new_full new_zeros new_ones full_like zeros_like ones_like".split()
)
_COMMUTES = frozenset("add mul maximum minimum eq ne logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor hypot".split())
_SCALARS = frozenset("add sub rsub mul div pow clamp clamp_min clamp_max where lt le gt ge eq ne addcmul addcdiv remainder fmod lerp".split())


def operator_base(op: str) -> str:
    """``mul`` of ``aten.mul.Tensor``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def _of_node(region: dict[str, Any], i: int, node: dict[str, Any], bits: int) -> Iterator[Mutant]:
    name, value = operator_base(node["op"]), _meta(node["value"])
    if name in _QUIET or value is None or math.prod(value["shape"]) == 0:
        return
    place = f"node {i} ({node['op']})"

    def make(kind: str, what: str, call: NodeCall) -> Mutant:
        return Mutant(kind, f"{place}: {what}", node=i, call=call)

    tensors = {p: meta for p, arg in enumerate(node["args"]) if (meta := _operand_meta(region, arg)) is not None}
    for p, meta in tensors.items():
        if meta["shape"] == value["shape"]:
            yield make("drop", f"left out, operand {p} in its place", _instead(p))
        if meta["dtype"] in FLOATS or meta["dtype"] == "bool":
            yield make("operand", f"operand {p} is zero", _argument(p, torch.zeros_like))
            yield make("operand", f"operand {p} is one", _argument(p, torch.ones_like))
    if not any(meta["shape"] == value["shape"] for meta in tensors.values()):
        yield make("drop", "its result is zero", _result(torch.zeros_like))
        yield make("drop", "its result is one", _result(torch.ones_like))
    if len(tensors) >= 2 and {0, 1} <= tensors.keys() and name not in _COMMUTES and tensors[0]["shape"] == tensors[1]["shape"]:
        yield make("swap", "operands exchanged", lambda f, a, k: f(a[1], a[0], *a[2:], **k))
    for what, call in _constants(node, name):
        yield make("constant", what, call)
    for kind, what, call in reductions.cuts(node, name, bits):
        yield make(kind, what, call)
    if value["dtype"] in FLOATS:
        for what, call in _cheaper(name, bits):
            yield make("approximation", what, call)
        own = min(bits, BITS[DTYPES[value["dtype"]]])
        yield make("precision", f"its result in {LOWER[own][0]} bits", _result(lambda t: rounded(t, LOWER[own][0])))


def _operand_meta(region: dict[str, Any], arg: Any) -> dict[str, Any] | None:
    if not isinstance(arg, dict) or "ref" not in arg:
        return None
    (operand,) = operands(arg)
    return region["inputs"][operand["input"]]["meta"] if "input" in operand else _meta(region["nodes"][operand["node"]]["value"])


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def _with_first(result: Any, tensor: torch.Tensor) -> Any:
    return (tensor, *result[1:]) if isinstance(result, (tuple, list)) else tensor


def _result(change: Change) -> NodeCall:
    def call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        return _with_first(result, change(_first(result)))

    return call


def _argument(position: int, change: Callable[[Any], Any]) -> NodeCall:
    def call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return function(*args[:position], change(args[position]), *args[position + 1 :], **kwargs)

    return call


def _instead(position: int) -> NodeCall:
    def call(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        return _with_first(result, args[position].to(_first(result).dtype))

    return call


def _constants(node: dict[str, Any], name: str) -> Iterator[tuple[str, NodeCall]]:
    """Numbers of the function itself: every float, and integers of arithmetic; not sizes and dimensions."""

    def number(arg: Any) -> float | None:
        if not isinstance(arg, dict):
            return None
        value = arg.get("float", arg.get("int") if name in _SCALARS else None)
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    def others(value: float) -> list[float]:
        if 0 < abs(value) < 1e-2:
            # An epsilon, as a rule: it matters where all else is small.
            return [0.0, 10 * value]
        return [0.0, -value, value * (1 + 2**-6)] if value else [1.0]

    for p, arg in enumerate(node["args"]):
        if (value := number(arg)) is not None:
            for other in others(value):
                yield f"{value:g} became {other:g}", _argument(p, lambda _, other=other: other)
    for key, arg in node["kwargs"]:
        if (value := number(arg)) is not None:
            for other in others(value):
                yield f"{key} {value:g} became {other:g}", (
                    lambda f, a, k, key=key, other=other: f(*a, **{**k, key: type(k[key])(other) if other.is_integer() else other})
                )


def _clamped(low: float, high: float) -> NodeCall:
    return _argument(0, lambda t: t.clamp(low, high))


def _formula(change: Change) -> NodeCall:
    return lambda f, a, k: change(a[0])


_FORMULAS: dict[str, tuple[str, Change]] = {
    "exp": ("(1 + x/256)^256", lambda x: (1 + x / 256).pow(256)),
    "tanh": ("a Padé approximant", lambda x: (x * (27 + x * x) / (27 + 9 * x * x)).clamp(-1, 1)),
    "erf": ("tanh of a cubic", lambda x: torch.tanh(1.128379 * x + 0.1009 * x**3)),
    "sigmoid": ("x/(1 + |x|)", lambda x: 0.5 + 0.5 * x / (1 + x.abs())),
    "silu": ("x times a clamped line", lambda x: x * (x / 6 + 0.5).clamp(0, 1)),
    "gelu": ("x sigmoid(1.702 x)", lambda x: x * torch.sigmoid(1.702 * x)),
    "sin": ("three terms of its series", lambda x: x - x**3 / 6 + x**5 / 120),
    "cos": ("three terms of its series", lambda x: 1 - x * x / 2 + x**4 / 24),
    "softplus": ("relu", torch.relu),
    "relu": ("gelu", torch.nn.functional.gelu),
}
_RANGES = {"exp": 4.0, "exp2": 6.0, "tanh": 2.0, "erf": 1.5, "sigmoid": 4.0, "silu": 6.0, "gelu": 6.0, "softplus": 8.0, "sin": 3.2, "cos": 3.2}
_POSITIVE = frozenset("log log2 log1p rsqrt sqrt reciprocal".split())


def _cheaper(name: str, bits: int) -> Iterator[tuple[str, NodeCall]]:
    if name in _FORMULAS:
        what, change = _FORMULAS[name]
        yield f"as {what}", _formula(change)
    if name in _RANGES:
        yield f"right on [-{_RANGES[name]:g}, {_RANGES[name]:g}] only", _clamped(-_RANGES[name], _RANGES[name])
    if name in _POSITIVE:
        yield "right from 1e-3 on only", _clamped(1e-3, math.inf)
        yield "right up to 100 only", _clamped(-math.inf, 100.0)
    if name in _RANGES or name in _POSITIVE or name == "pow":
        yield "to half of its digits", _result(lambda t: rounded(t, bits // 2 + 1))


# ---- inputs and outputs, whatever the graph


def _of_input(i: int, meta: dict[str, Any], bits: int) -> Iterator[Mutant]:
    shape = meta["shape"]

    def make(kind: str, what: str, change: Change) -> Mutant:
        return Mutant(kind, f"input {i}: {what}", inputs=lambda ts: [change(t) if k == i else t for k, t in enumerate(ts)])

    if math.prod(shape) == 0:
        return
    if meta["dtype"] in FLOATS:
        for lower in LOWER[min(bits, BITS[DTYPES[meta["dtype"]]])]:
            yield make("precision", f"read in {lower} bits", lambda t, lower=lower: rounded(t, lower))
        yield make("input", "taken as zero", torch.zeros_like)
        yield make("special", "NaN and infinities taken as zero", lambda t: torch.where(torch.isfinite(t), t, 0.0))
        yield make("input", "its mean everywhere", lambda t: torch.full_like(t, t.mean(dtype=torch.float64).item()))
    for dim, size in enumerate(shape):
        if size > 1:
            yield make("index", f"off by one along dimension {dim}", lambda t, dim=dim: t.roll(1, dim))
            yield make("index", f"its first place along dimension {dim} for all", lambda t, dim=dim: t.narrow(dim, 0, 1).expand(t.shape).contiguous())


def _of_outputs(region: dict[str, Any], bits: int) -> list[Mutant]:
    found: list[Mutant] = []
    # A few outputs stand for all of them.
    for o, node in list(enumerate(region["outputs"]))[:4]:
        meta = _meta(region["nodes"][node]["value"])
        if meta is None or math.prod(meta["shape"]) == 0:
            continue
        numel, real = math.prod(meta["shape"]), meta["dtype"] in FLOATS

        def make(what: str, change: Callable[[Known, torch.Tensor], torch.Tensor], o: int = o, kind: str = "output") -> None:
            def outputs(known: Known) -> list[torch.Tensor]:
                return [change(known, t).to(t.dtype).expand(t.shape) if k == o else t for k, t in enumerate(known.right)]

            found.append(Mutant(kind, f"output {o}: {what}", outputs=outputs))

        make("zeros", lambda k, t: torch.zeros_like(t))
        make("of other inputs", lambda k, t, o=o: k.others[0][o], kind="stale")
        make("of yet other inputs", lambda k, t, o=o: k.others[-1][o], kind="stale")
        for tail in sorted({1, max(numel // 100, 1), min(16, numel)}):
            make(f"the last {tail} not written", lambda k, t, tail=tail: _tail(t, tail, math.nan), kind="tail")
            make(f"the last {tail} zero", lambda k, t, tail=tail: _tail(t, tail, 0.0), kind="tail")
        if not real:
            continue
        make("its mean", lambda k, t: torch.full_like(t, t.mean(dtype=torch.float64).item()))
        make("negative", lambda k, t: -t)
        make("a little too large", lambda k, t: t * (1 + 2.0 ** -(bits // 2)))
        for dim in range(len(meta["shape"])) if numel > 1 else ():
            if 1 < meta["shape"][dim] < numel:
                make(f"its mean along dimension {dim}", lambda k, t, dim=dim: t.mean(dim, keepdim=True, dtype=torch.float64))
        for i, entry in enumerate(region["inputs"]):
            if entry["meta"]["shape"] == meta["shape"]:
                make(f"input {i}", lambda k, t, i=i: k.inputs[i], kind="copy")
    return found


def _tail(t: torch.Tensor, count: int, value: float) -> torch.Tensor:
    """The last elements in logical order replaced: by ``value``, or by what poison reads as in whole numbers."""
    flat = t.reshape(-1).clone()
    flat[-count:] = value if t.is_floating_point() or not math.isnan(value) else 1
    return flat.reshape(t.shape)

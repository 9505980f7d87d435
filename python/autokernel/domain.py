"""What is known of a value's range: from how the graph computes it, or from what was captured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .region import operator_name


@dataclass(frozen=True)
class Range:
    """The closed interval of an input's values."""

    low: float = -math.inf
    high: float = math.inf

    def meet(self, other: Range) -> Range:
        """What both allow."""
        return Range(max(self.low, other.low), min(self.high, other.high))

    def fold(self, values: torch.Tensor) -> torch.Tensor:
        """The values brought inside, signs kept where both are allowed. Folded, not clipped: clipping would make
        most values of a large family equal."""
        low, high = self.low, self.high
        if low == -math.inf and high == math.inf:
            return values
        if high == math.inf:
            return values.abs().add_(low) if low >= 0 else torch.where(values < low, 2 * low - values, values)
        if low == -math.inf:
            return values.abs().neg_().add_(high) if high <= 0 else torch.where(values > high, 2 * high - values, values)
        size = values.abs()
        # One stays one, so that the ends are met.
        part = torch.where((size > 0) & (size.frac() == 0), 1.0, size.frac())
        if low >= 0:
            return part.mul_(high - low).add_(low)
        if high <= 0:
            return part.mul_(low - high).add_(high)
        return torch.where(values < 0, part * low, part * high)


_ALL = Range()
_NOT_NEGATIVE = Range(0.0, math.inf)
_SHARE = Range(0.0, 1.0)
_UNIT = Range(-1.0, 1.0)
_OF_RESULT = {
    **dict.fromkeys("abs relu exp exp2 sqrt rsqrt softplus square norm linalg_vector_norm var std acos".split(), _NOT_NEGATIVE),
    **dict.fromkeys("sigmoid hardsigmoid _softmax softmax".split(), _SHARE),
    **dict.fromkeys("tanh sin cos erf sign sgn".split(), _UNIT),
    **dict.fromkeys("_log_softmax log_softmax logsigmoid log_sigmoid_forward".split(), Range(-math.inf, 0.0)),
    "relu6": Range(0.0, 6.0),
    "cosh": Range(1.0, math.inf),
    "atan": Range(-math.pi / 2, math.pi / 2),
    "asin": Range(-math.pi / 2, math.pi / 2),
}
_PASSES = frozenset(
    "view _unsafe_view reshape expand permute transpose t unsqueeze squeeze slice select split split_with_sizes chunk clone alias detach "
    "contiguous getitem cat stack flatten unflatten index gather index_select repeat mean amax amin max_pool2d avg_pool2d "
    "_to_copy to flip roll".split()
)
_KEEPS_SIGN = frozenset("sum add mul div maximum minimum cumsum".split())


def known_range(node: fx.Node, depth: int = 12) -> Range:
    """What follows from how the graph computes a value; nothing is claimed where that is not simple."""
    if node.op != "call_function" or depth == 0:
        return _ALL
    parts = operator_name(node.target).split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    if name in _OF_RESULT:
        return _OF_RESULT[name]
    if name == "pow" and len(node.args) > 1 and isinstance(node.args[1], (int, float)) and node.args[1] % 2 == 0:
        return _NOT_NEGATIVE
    if name in ("clamp", "clamp_min", "clamp_max", "hardtanh"):
        return _clamped(node, name, depth)
    if name not in _PASSES and name not in _KEEPS_SIGN:
        return _ALL
    values = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args[: 2 if name in _KEEPS_SIGN else 1]
    ranges = [known_range(v, depth - 1) if isinstance(v, fx.Node) else _of_number(v) for v in values]
    if not ranges:
        return _ALL
    if name in _PASSES:
        return Range(min(r.low for r in ranges), max(r.high for r in ranges))
    return _NOT_NEGATIVE if all(r.low >= 0 for r in ranges) else _ALL


def _clamped(node: fx.Node, name: str, depth: int) -> Range:
    bounds = [*node.args[1:3], None, None]
    low, high = (None, bounds[0]) if name == "clamp_max" else (bounds[0], bounds[1])
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    given = Range(
        float(low) if isinstance(low, (int, float)) else -math.inf, float(high) if isinstance(high, (int, float)) else math.inf
    )
    operand = node.args[0]
    return given.meet(known_range(operand, depth - 1)) if isinstance(operand, fx.Node) else given


def _of_number(value: Any) -> Range:
    return Range(float(value), float(value)) if isinstance(value, (int, float)) else _ALL


def of_signs(values: torch.Tensor) -> Range:
    """What captured values have in common by their signs, and whether they are shares or cosines."""
    if values.numel() == 0 or not bool(torch.isfinite(values).all()):
        return _ALL
    low, high = values.min().item(), values.max().item()
    within = -1 <= low and high <= 1
    return Range(0.0 if low >= 0 else -1.0 if within else -math.inf, 1.0 if within and high > 0 else 0.0 if high <= 0 else math.inf)


def exactly(values: torch.Tensor) -> Range:
    """From the smallest to the largest captured value."""
    if values.numel() == 0 or not bool(torch.isfinite(values).all()):
        return _ALL
    return Range(values.min().item(), values.max().item())

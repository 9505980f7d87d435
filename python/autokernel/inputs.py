"""Input sets of several families for one region, with their truths, baselines and noise.

No single distribution shows every fault: numbers of one sign hide lost precision, equal scales hide a
missing rescale, captured weights of one hide a forgotten product. What a family gives is first cut to
what the graph says about an input (the result of a square is never negative), and if the truth is then
still not finite, to what the captured values looked like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import noise, tensors
from . import region as regions
from .region import operator_name
from .wire import RequestError


@dataclass(frozen=True)
class Range:
    """What is known of an input's values."""

    non_negative: bool = False
    at_most_one: bool = False


@dataclass
class _Source:
    """One input of the region: what it was in the captured run, and how to make others like it."""

    description: dict[str, Any]
    constant: bool
    captured: torch.Tensor
    known: Range
    seen: Range
    scale: float
    mean: float
    deviation: float
    categories: bool


class _Unfit(Exception):
    """Why a family gives no usable set."""


# ---- families: (shape, generator, unit roundoff) -> values of scale one

Family = Callable[[Sequence[int], torch.Generator, float], torch.Tensor]


def _rows(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-1], 1) if shape else ()


def _normal(shape: Sequence[int], g: torch.Generator, _u: float) -> torch.Tensor:
    return torch.randn(shape, generator=g)


def _uniform(shape: Sequence[int], g: torch.Generator, _u: float) -> torch.Tensor:
    return torch.rand(shape, generator=g)


def _wide_rows(shape: Sequence[int], g: torch.Generator, _u: float) -> torch.Tensor:
    scale = torch.randn(_rows(shape), generator=g).mul_(2).exp_().clamp_(1e-3, 1e3)
    return torch.randn(shape, generator=g).mul_(scale)


def _constant_rows(shape: Sequence[int], g: torch.Generator, _u: float) -> torch.Tensor:
    return torch.randn(_rows(shape), generator=g).expand(shape)


def _low_variance(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    # The spread must survive the element type's rounding at the offset.
    offset = 10 * torch.randn(_rows(shape), generator=g).sign()
    return torch.randn(shape, generator=g).mul_(10 * max(1e-3, 16 * u)).add_(offset)


def _outlier(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    values = _normal(shape, g, u)
    if values.numel():
        values.view(-1)[int(torch.randint(values.numel(), (), generator=g))] = 1e4
    return values


def _sparse(shape: Sequence[int], g: torch.Generator, _u: float) -> torch.Tensor:
    return torch.randn(shape, generator=g).mul_(torch.rand(shape, generator=g) < 0.1)


def _scaled(factor: float) -> Family:
    return lambda shape, g, u: _normal(shape, g, u).mul_(factor)


# In the order of what they find; a request for few sets gets the first ones. Where one has several
# forms, the first whose truth is finite is taken.
_FAMILIES: tuple[tuple[str, tuple[Family, ...]], ...] = (
    ("normal", (_normal,)),
    ("wide_rows", (_wide_rows,)),
    ("outlier", (_outlier,)),
    ("low_variance", (_low_variance,)),
    ("large", (_scaled(1e3), _scaled(30.0))),
    ("small", (_scaled(1e-3),)),
    ("uniform", (_uniform,)),
    ("sparse", (_sparse,)),
    ("constant_rows", (_constant_rows,)),
)
_MORE = ("normal", "wide_rows", "outlier")


def write_sets(
    region: dict[str, Any],
    recorded: Sequence[Sequence[torch.Tensor]],
    known: Sequence[Range],
    sets: int,
    seed: int,
    folder: Path,
) -> dict[str, Any]:
    """Writes up to ``sets`` sets: the recorded ones first, then families. One set is in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        wide = regions.widen(region)
        maker = _Maker(region, wide, recorded[0], known, seed)
    except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
        raise RequestError("no_truth", f"the region has no fp64 form: {error}") from error
    written: list[dict[str, Any]] = []
    dropped: list[dict[str, str]] = []
    for name, values in zip(("captured", "captured2"), recorded):
        if len(written) < sets:
            written.append(maker.write(folder, len(written), name, maker.captured(values)))
    if len(recorded) < 2:
        dropped.append({"family": "captured2", "reason": "the second draw did not reach this graph"})
    for number, name, forms in _plan(sets):
        if len(written) >= sets:
            break
        generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % (1 << 63))
        try:
            written.append(maker.write(folder, len(written), name, maker.family(forms, generator)))
        except _Unfit as reason:
            dropped.append({"family": name, "reason": str(reason)})
    return {"sets": written, "dropped": dropped, "jumps": regions.jumps(region)}


def _plan(sets: int) -> Iterator[tuple[int, str, tuple[Family, ...]]]:
    """All families once, then the most telling ones again, up to twice as many tries as sets."""
    forms = dict(_FAMILIES)
    yield from ((i, name, found) for i, (name, found) in enumerate(_FAMILIES))
    for i in range(2 * sets):
        name = _MORE[i % len(_MORE)]
        yield len(_FAMILIES) + i, f"{name}{i // len(_MORE) + 2}", forms[name]


class _Maker:
    """Makes sets for one region and knows where its truth is finite."""

    def __init__(self, region: dict[str, Any], wide: dict[str, Any], captured: Sequence[torch.Tensor], known: Sequence[Range], seed: int = 0):
        self.region, self.wide, self.seed = region, wide, seed
        self.sources = [_source(entry, value, k) for entry, value, k in zip(region["inputs"], captured, known, strict=True)]
        self.finite = [torch.isfinite(t) for t in regions.run(wide, [_wide(t) for t in captured])]

    def captured(self, values: Sequence[torch.Tensor]) -> _Set:
        """A recorded set, in memory as the region describes it."""
        return self._evaluate([tensors.as_described(v, s.description) for v, s in zip(values, self.sources, strict=True)])

    def family(self, forms: tuple[Family, ...], generator: torch.Generator) -> _Set:
        """The first form that fits, first with what the graph says, then with what the data looked like."""
        reason = _Unfit("nothing in it can vary")
        for form in forms:
            for use_seen in (False, True):
                given = [_draw(source, form, generator, use_seen) for source in self.sources]
                try:
                    made = self._evaluate(given)
                    self._check(made)
                    return made
                except _Unfit as error:
                    reason = error
        raise reason

    def _evaluate(self, given: list[torch.Tensor]) -> _Set:
        truth = regions.run(self.wide, [_wide(t) for t in given])
        return _Set(given, truth, regions.run(self.region, given))

    def _check(self, made: _Set) -> None:
        for truth, own, finite in zip(made.truth, made.baseline, self.finite):
            if not torch.isfinite(truth)[finite].all():
                raise _Unfit("the truth is not finite where the captured one is")
            if not torch.isfinite(own)[finite].all():
                raise _Unfit("the baseline overflows where the captured truth is finite")

    def write(self, folder: Path, number: int, name: str, made: _Set) -> dict[str, Any]:
        def store(kind: str, values: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
            # Children that hold a candidate may read the inputs, and nothing beside them.
            place = folder / ("inputs" if kind == "in" else "answers")
            place.mkdir(exist_ok=True)
            return [tensors.write(t, place / f"set{number}-{kind}{i}") for i, t in enumerate(values)]

        wide = [t.double().contiguous() for t in made.truth]
        spread = noise.of_region(self.region, self.wide, made.inputs, wide, self.seed + number)
        return {
            "family": name,
            "inputs": store("in", made.inputs),
            "truth": store("truth", wide),
            "baseline": store("baseline", [t.contiguous() for t in made.baseline]),
            "noise": store("noise", spread),
        }


@dataclass
class _Set:
    inputs: list[torch.Tensor]
    truth: list[torch.Tensor]
    baseline: list[torch.Tensor]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _rms(values: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(values.double()) / math.sqrt(max(values.numel(), 1))).item()


def _source(entry: dict[str, Any], captured: torch.Tensor, known: Range) -> _Source:
    value = captured.detach()
    if not value.is_floating_point():
        return _Source(entry["meta"], entry["constant"], value, known, Range(), 1.0, 0.0, 1.0, True)
    seen = value.double()
    finite = bool(torch.isfinite(seen).all())
    empty = value.numel() == 0
    within = Range(not empty and bool((seen >= 0).all()), not empty and bool((seen <= 1).all()))
    # A mask holds a few values only, such as 0 and minus infinity; its places may be mixed, not its values.
    sample = seen.reshape(-1)[:: max(value.numel() // 4096, 1)]
    few = value.numel() > 8 and 1 < sample.unique().numel() <= 4 and seen.unique().numel() <= 4
    rms = _rms(seen) if finite else 1.0
    return _Source(
        entry["meta"],
        entry["constant"],
        value,
        known,
        within,
        scale=min(max(rms, 1e-3), 1e3) if rms > 0 else 1.0,
        mean=seen.mean().item() if finite and not empty else 0.0,
        deviation=seen.std(correction=0).item() if finite and not empty else 0.0,
        categories=few or not finite,
    )


def _draw(source: _Source, form: Family, generator: torch.Generator, use_seen: bool) -> torch.Tensor:
    shape, dtype = source.description["shape"], source.captured.dtype
    if source.categories:
        if use_seen:
            return tensors.as_described(source.captured, source.description)
        order = torch.randperm(source.captured.numel(), generator=generator)
        return tensors.as_described(source.captured.reshape(-1)[order].reshape(shape), source.description)
    if source.constant:
        spread = max(source.deviation, 0.1 * abs(source.mean)) or 0.1
        values = torch.randn(shape, generator=generator).mul_(spread).add_(source.mean)
        limits = source.seen if use_seen else Range()
    else:
        values = form(shape, generator, noise.ROUNDOFF[dtype]).mul(source.scale)
        limits = source.seen if use_seen else source.known
    if limits.non_negative:
        values = values.abs()
        if limits.at_most_one:
            # Folded, not clipped: clipping would make most values of a large family equal.
            values = values.frac()
    return tensors.as_described(values.to(dtype), source.description)


# ---- what the graph says about a value

_NOT_NEGATIVE = frozenset(
    "abs relu relu6 exp exp2 sqrt rsqrt sigmoid hardsigmoid softplus _softmax softmax square cosh norm "
    "linalg_vector_norm var".split()
)
_AT_MOST_ONE = frozenset("sigmoid hardsigmoid _softmax softmax".split())
_PASSES = frozenset(
    "view _unsafe_view reshape expand permute transpose t unsqueeze squeeze slice select split split_with_sizes chunk clone alias detach "
    "contiguous getitem cat stack flatten unflatten index gather index_select repeat mean amax amin max_pool2d avg_pool2d "
    "_to_copy to flip roll".split()
)
_KEEPS_SIGN = frozenset("sum add mul div maximum minimum sqrt cumsum".split())


def known_range(node: fx.Node, depth: int = 12) -> Range:
    """What follows from how the graph computes a value; nothing is claimed where that is not simple."""
    if node.op != "call_function" or depth == 0:
        return Range()
    parts = operator_name(node.target).split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    if name in _NOT_NEGATIVE:
        return Range(True, name in _AT_MOST_ONE)
    if name == "pow" and len(node.args) > 1 and isinstance(node.args[1], (int, float)) and node.args[1] % 2 == 0:
        return Range(True, False)
    if name not in _PASSES and name not in _KEEPS_SIGN:
        return Range()
    values = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args[: 2 if name in _KEEPS_SIGN else 1]
    ranges = [known_range(v, depth - 1) if isinstance(v, fx.Node) else _of_number(v) for v in values]
    positive = bool(ranges) and all(r.non_negative for r in ranges)
    return Range(positive, positive and name in _PASSES and all(r.at_most_one for r in ranges))


def _of_number(value: Any) -> Range:
    number = isinstance(value, (int, float))
    return Range(number and value >= 0, number and 0 <= value <= 1)

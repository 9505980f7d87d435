"""Input sets of several families for one region, with their truths, baselines and noise.

What a family gives is first cut to what the graph says about an input (the result of a square is never
negative), and if the truth is then still not finite, to what the captured values looked like. Two more
sets hold special values: NaN, infinities and the type's largest numbers; zeros of both signs and numbers
too small for full precision. These are what they are for, and nothing of them is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import families, noise, tensors
from . import region as regions
from .domain import Range, exactly, of_signs
from .families import Family
from .wire import RequestError


@dataclass
class _Source:
    """One input of the region: what it was in the captured run, and how to make others like it."""

    description: dict[str, Any]
    constant: bool
    captured: torch.Tensor
    ranges: tuple[Range, ...]
    """What the graph says, then what captured values have in common, then where they lie."""
    scale: float
    mean: float
    deviation: float
    categories: bool


class _Unfit(Exception):
    """Why a family gives no usable set."""


def write_sets(
    region: dict[str, Any],
    recorded: Sequence[Sequence[torch.Tensor]],
    known: Sequence[Range],
    sets: int,
    seed: int,
    folder: Path,
    other_than: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Writes up to ``sets`` sets of finite values, the recorded ones first, then families; then those of special
    values. One set is in memory at a time. With ``other_than``, all families that are not named there instead."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        wide = regions.widen(region)
        maker = _Maker(region, wide, recorded[0], known, seed)
    except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
        raise RequestError("no_truth", f"the region has no fp64 form: {error}") from error
    written: list[dict[str, Any]] = []
    dropped: list[dict[str, str]] = []
    number = 0 if other_than is None else len(other_than) + _SPECIAL

    def attempt(name: str, make: Callable[[], _Set]) -> None:
        try:
            written.append(maker.write(folder, number + len(written), name, make()))
        except _Unfit as reason:
            dropped.append({"family": name, "reason": str(reason)})

    def generator(place: int) -> torch.Generator:
        return torch.Generator().manual_seed((seed * 1_000_003 + place) % (1 << 63))

    if other_than is not None:
        for place, (name, forms) in enumerate(families.ALL.items()):
            if name not in other_than:
                attempt(name, lambda: maker.family(forms, generator(place)))
        return {"sets": written, "dropped": dropped, "jumps": regions.jumps(region)}
    for name, values in zip(("captured", "captured2"), recorded):
        if len(written) < sets:
            attempt(name, lambda: maker.captured(values))
    if len(recorded) < 2:
        dropped.append({"family": "captured2", "reason": "the second draw did not reach this graph"})
    for place, name, forms in families.plan(sets, seed):
        if len(written) >= sets:
            break
        attempt(name, lambda: maker.family(forms, generator(place)))
    for place in range(_SPECIAL):
        attempt(_SPECIAL_NAMES[place], lambda: maker.special(_SPECIAL_NAMES[place], generator(-1 - place)))
    return {"sets": written, "dropped": dropped, "jumps": regions.jumps(region)}


# The judge knows sets of special values by the beginning of their names.
_SPECIAL_NAMES = tuple(families.specials(torch.float32))
_SPECIAL = len(_SPECIAL_NAMES)


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
            for narrow in range(_NARROWEST + 1):
                given = [_draw(source, form, generator, narrow) for source in self.sources]
                try:
                    made = self._evaluate(given)
                    self._check(made)
                    return made
                except _Unfit as error:
                    reason = error
        raise reason

    def special(self, name: str, generator: torch.Generator) -> _Set:
        """Special values among those of the first form that fits, in every input that is no constant; in all
        where there is no other."""
        base = None
        for forms in ((families.normal,), (families.uniform,)):
            try:
                base = base or self.family(forms, generator)
            except _Unfit:
                continue
        given = [tensors.as_described(s.captured, s.description) for s in self.sources] if base is None else base.inputs
        floats = [s.captured.is_floating_point() and not s.categories for s in self.sources]
        varying = [f and not s.constant for f, s in zip(floats, self.sources)]
        chosen = varying if any(varying) else floats
        if not any(chosen):
            raise _Unfit("no input of a float type that takes any value")
        made = [
            tensors.as_described(families.sprinkled(t, families.specials(t.dtype)[name], generator), s.description) if c else t
            for t, s, c in zip(given, self.sources, chosen)
        ]
        return self._evaluate(made)

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
        return _Source(entry["meta"], entry["constant"], value, (Range(),), 1.0, 0.0, 1.0, True)
    seen = value.double()
    finite = bool(torch.isfinite(seen).all())
    empty = value.numel() == 0
    # A mask holds a few values only, such as 0 and minus infinity; its places may be mixed, not its values.
    sample = seen.reshape(-1)[:: max(value.numel() // 4096, 1)]
    few = value.numel() > 8 and 1 < sample.unique().numel() <= 4 and seen.unique().numel() <= 4
    rms = _rms(seen) if finite else 1.0
    return _Source(
        entry["meta"],
        entry["constant"],
        value,
        (known, known.meet(of_signs(seen)), known.meet(exactly(seen))),
        # A power of two, so that 0 and 1 stay exact in sums.
        scale=2.0 ** round(math.log2(min(max(rms, 1e-3), 1e3))) if rms > 0 else 1.0,
        mean=seen.mean().item() if finite and not empty else 0.0,
        deviation=seen.std(correction=0).item() if finite and not empty else 0.0,
        categories=few or not finite,
    )


# The last of a source's ranges.
_NARROWEST = 2


def _draw(source: _Source, form: Family, generator: torch.Generator, narrow: int) -> torch.Tensor:
    shape, dtype = source.description["shape"], source.captured.dtype
    if source.categories:
        if narrow:
            return tensors.as_described(source.captured, source.description)
        order = torch.randperm(source.captured.numel(), generator=generator)
        return tensors.as_described(source.captured.reshape(-1)[order].reshape(shape), source.description)
    unit = noise.ROUNDOFF[dtype]
    if source.constant:
        spread = max(source.deviation, 0.1 * abs(source.mean)) or 0.1
        values = families.normal(shape, generator, unit).mul_(spread).add_(source.mean)
        limits = source.ranges[narrow] if narrow else Range()
    else:
        values = form(shape, generator, unit).mul(source.scale)
        limits = source.ranges[narrow]
    return tensors.as_described(limits.fold(values).to(dtype), source.description)

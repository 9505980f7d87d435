"""Families of values, of scale one: each shows faults that another hides.

Numbers of one sign hide lost precision, equal scales a missing rescale, an even spread a shortcut for the variance,
large sums a forgotten last element. No family is enough alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch

Family = Callable[[Sequence[int], torch.Generator, float], torch.Tensor]
"""``(shape, generator, unit roundoff of the type that the values will get)`` to values."""

# Below this the type is fp64, whose digits fp32 draws would leave empty.
_FP64 = 2.0**-40


def _type(u: float) -> torch.dtype:
    return torch.float64 if u < _FP64 else torch.float32


def _rows(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-1], 1) if shape else ()


def _columns(shape: Sequence[int]) -> tuple[int, ...]:
    return (*(1 for _ in shape[:-1]), shape[-1]) if shape else ()


def normal(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """N(0, 1)."""
    return torch.randn(shape, generator=g, dtype=_type(u))


def uniform(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """U[0, 1): nothing cancels."""
    return torch.rand(shape, generator=g, dtype=_type(u))


def _spread(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    return normal(shape, g, u).mul_(2).exp_().clamp_(1e-3, 1e3)


def wide_rows(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """Each row of a scale of its own, lognormal over six decades."""
    return normal(shape, g, u).mul_(_spread(_rows(shape), g, u))


def wide_columns(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """Each column of a scale of its own."""
    return normal(shape, g, u).mul_(_spread(_columns(shape), g, u))


def constant_rows(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """One value a row: no spread at all."""
    return normal(_rows(shape), g, u).expand(shape)


def low_variance(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """A thousandth around ten."""
    # The spread must survive the element type's rounding at the offset.
    offset = 10 * normal(_rows(shape), g, u).sign()
    return normal(shape, g, u).mul_(10 * max(1e-3, 16 * u)).add_(offset)


def offset_mean(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """A spread of a few steps of the type, far from zero: a mean of squares has no digits left for a variance."""
    return normal(shape, g, u).mul_(max(1e-4, 2 * u)).add_(1).mul_(100)


def outlier(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """One value of 1e4 at a random place: whoever probes a few values misses it."""
    values = normal(shape, g, u)
    if values.numel():
        values.view(-1)[int(torch.randint(values.numel(), (), generator=g))] = 1e4
    return values


def edges(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """The first and the last places of every dimension outweigh the rest, so that none can be left out."""
    values = normal(shape, g, u)
    for dim, size in enumerate(shape):
        if size > 2:
            values.select(dim, 0).mul_(8)
            values.select(dim, size - 1).mul_(32)
    return values


def sparse(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """Nine in ten are zero."""
    return normal(shape, g, u).mul_(torch.rand(shape, generator=g) < 0.1)


def zero_rows(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """A quarter of the rows are zero throughout: what keeps a division finite there is all that counts."""
    return normal(shape, g, u).mul_(torch.rand(_rows(shape), generator=g) < 0.75)


def near_ties(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """Values a few steps of the type apart, and equal ones."""
    return torch.randint(-2, 3, shape, generator=g).to(_type(u)).mul_(max(2 * u, 1e-15)).add_(1).mul_(normal(_rows(shape), g, u))


def zero_one(shape: Sequence[int], g: torch.Generator, u: float) -> torch.Tensor:
    """0 and 1, whose sums are exact in any order."""
    return torch.randint(0, 2, shape, generator=g).to(_type(u))


def scaled(factor: float) -> Family:
    """N(0, 1) times ``factor``."""
    return lambda shape, g, u: normal(shape, g, u).mul_(factor)


# Where one has several forms, the first whose truth is finite is taken. The first ones find most, and every task
# has them; of the others each seed takes some, and the controls add what they need.
ALWAYS: dict[str, tuple[Family, ...]] = {
    "normal": (normal,),
    "wide_rows": (wide_rows,),
    "outlier": (outlier,),
    "low_variance": (low_variance,),
    "large": (scaled(1e3), scaled(30.0)),
    "edges": (edges,),
}
OTHERS: dict[str, tuple[Family, ...]] = {
    "small": (scaled(1e-3),),
    "uniform": (uniform,),
    "sparse": (sparse,),
    "zero_rows": (zero_rows,),
    "constant_rows": (constant_rows,),
    "offset_mean": (offset_mean,),
    "wide_columns": (wide_columns,),
    "near_ties": (near_ties,),
    "zero_one": (zero_one,),
}
ALL = ALWAYS | OTHERS
_MORE = ("normal", "wide_rows", "outlier")


def plan(sets: int, seed: int) -> Iterator[tuple[int, str, tuple[Family, ...]]]:
    """All families once, the others in an order of the seed's; then the most telling ones again, up to twice as
    many tries as sets."""
    others = list(OTHERS)
    random.Random(seed).shuffle(others)
    order = [*ALWAYS, *others]
    yield from ((i, name, ALL[name]) for i, name in enumerate(order))
    for i in range(2 * sets):
        name = _MORE[i % len(_MORE)]
        yield len(order) + i, f"{name}{i // len(_MORE) + 2}", ALL[name]


def specials(dtype: torch.dtype) -> dict[str, list[float]]:
    """Values that a float type has beside the ordinary ones, by the set that they make."""
    info = torch.finfo(dtype)
    step = info.smallest_normal * info.eps
    # Of fp64 one whose square the judge can still add up.
    most = min(info.max, 1e150)
    return {
        "special": [float("nan"), float("inf"), float("-inf")],
        "special_large": [most, -most],
        "special_small": [-0.0, 0.0, step, -step, 1000 * step, info.smallest_normal, -info.smallest_normal],
    }


def sprinkled(values: torch.Tensor, specials: Sequence[float], g: torch.Generator) -> torch.Tensor:
    """The values with special ones in every fourth row or so, one to four in a row, at random places."""
    if not values.numel():
        return values
    flat = values.clone().reshape(-1, values.shape[-1] if values.dim() > 1 else 1)
    rows, columns = flat.shape
    chosen = torch.randperm(rows, generator=g)[: max(rows // 4, 1)].repeat(4 if columns > 1 else 1)
    chosen = chosen[: max(len(chosen) * min(columns, 16) // 16, 1)]
    places = torch.randint(columns, chosen.shape, generator=g)
    which = torch.tensor(list(specials), dtype=torch.float64)[torch.arange(len(chosen)) % len(specials)]
    flat[chosen, places] = which.to(values.dtype)
    return flat.reshape(values.shape)

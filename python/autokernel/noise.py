"""How far a truth moves when each value in it is known to one rounding only.

The error of one baseline run is one throw of the dice: where its row mean happened to be rounded well, a
whole row is nearly exact, and an honest kernel whose mean was rounded otherwise looks wrong. Here the dice
are thrown again (Monte Carlo arithmetic, Parker 1997): the fp64 form runs with every input, and every
result that an operator has to round, moved at random by as much as rounding in its own type moves it. The
root mean square over some runs is what honest arithmetic is off by, whoever's luck it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from . import region as regions
from .tensors import DTYPES

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

# One run may by chance stand still where the baseline was lucky, too; four hardly do.
RUNS = 4

# Signs of the errors of a region's sums in the runs. In the first all are as they came; and as the patterns are
# orthogonal, the errors of two sums do not cancel over the four runs.
_SIGNS = ((1, 1, 1, 1), (1, -1, 1, -1), (1, 1, -1, -1), (1, -1, -1, 1))

# Rounding to nearest is off by 0.425 u in the root mean square, relative to values whose leading digits are
# spread as usual; uniform noise within this many u is as large.
_WIDTH = 0.425 * math.sqrt(3)

# Sums are kept in fp32 at least, whatever the element type: products and terms of narrower types are exact there.
_SUMS = ROUNDOFF[torch.float32]

# A sum may be kept in one chain of additions, the plainest honest way: a random walk of the partial sums'
# roundings, sqrt(K/3) of them for terms of equal sign, and more where equal terms are rounded the same way each
# time. Products of matrices are not here: nobody sums those in one chain.
_SUMMING = frozenset("sum mean var std var_mean std_mean norm linalg_vector_norm logsumexp cumsum prod nansum".split())

# Chains up to this length are tried out, longer ones (blocked by anyone) estimated.
_LONGEST_CHAIN = 1 << 14

# Their results are operands, moved or chosen, so that nothing is rounded.
_EXACT = frozenset(
    "abs neg relu clamp clamp_min clamp_max maximum minimum fmax fmin amax amin max min where masked_fill cat stack "
    "index gather index_select embedding constant_pad_nd pad flip roll repeat clone copy contiguous _to_copy tril triu sort "
    "topk max_pool2d_with_indices round floor ceil trunc sign scatter index_put slice_scatter select_scatter "
    "bernoulli new_empty new_zeros new_ones zeros_like ones_like full_like empty_like lift_fresh_copy".split()
)

# Several roundings under one name, the first of which may move a whole row, or be all that is left: far below
# zero GELU is what one step of 1 + tanh or 1 + erf makes of it, and in fp64 nothing at all.
_COMPOSED = frozenset("native_layer_norm _softmax _log_softmax native_group_norm _fused_rms_norm gelu".split())


class Noise(TorchDispatchMode):
    """Moves each rounded result by as much as rounding to ``unit`` would."""

    def __init__(self, generator: torch.Generator, unit: float):
        super().__init__()
        self.generator, self.unit = generator, unit
        # Chains are tried in the first run; in later ones the same sums come again in the same order.
        self.chains: list[list[torch.Tensor | None]] = []
        self.run = self.sums = 0

    def rewind(self, generator: torch.Generator, run: int) -> None:
        """Makes ready for another run of the same operators."""
        self.generator, self.run, self.sums = generator, run, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        composed = decomposition_table.get(func) if name in _COMPOSED else None
        if composed is None:
            result = func(*args, **kwargs)
        else:
            unit, self.unit = self.unit, min(self.unit, _SUMS)
            try:
                with self:
                    result = composed(*args, **kwargs)
            finally:
                self.unit = unit
        if name in _EXACT or func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            return result
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if not given:
            return result
        if name not in _SUMMING:
            return pytree.tree_map(lambda value: self._moved(value), result)
        leaves, shape = pytree.tree_flatten(result)
        if self.sums == len(self.chains):
            self.chains.append(_chain_error(func, name, args, kwargs, leaves) if self.unit >= _SUMS else [None] * len(leaves))
        chain, sign = self.chains[self.sums], _SIGNS[self.sums % len(_SIGNS)][self.run % RUNS]
        self.sums += 1
        terms = given[0].numel()
        return pytree.tree_unflatten([self._moved(v, terms, error, sign) for v, error in zip(leaves, chain)], shape)

    def _moved(self, value: Any, terms: int = 0, chain: torch.Tensor | None = None, sign: int = 1) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
            return value
        walk = min(self.unit, _SUMS) * math.sqrt(terms / max(value.numel(), 1) / 3)
        result = moved(value, max(self.unit, walk), self.generator)
        if chain is not None:
            result.add_(chain.reshape(value.shape), alpha=sign)
        return result


def _chain_error(func: Any, name: str, args: Any, kwargs: Any, results: list[Any]) -> list[torch.Tensor | None]:
    """How far each result is off when its sum is kept in one chain in fp32; ``None`` where that is not tried."""
    given = {a.name: value for a, value in zip(func._schema.arguments, args)} | dict(kwargs)
    terms, dim = args[0], given.get("dim")
    dims = range(terms.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    dims = sorted({d % max(terms.dim(), 1) for d in dims})
    length = math.prod(terms.shape[d] for d in dims)
    if not 1 < length <= _LONGEST_CHAIN or name not in ("sum", "mean", "var", "var_mean", "linalg_vector_norm"):
        return [None] * len(results)
    if name in ("sum", "mean"):
        return [_one_chain(terms, dims).div_(length if name == "mean" else 1)]
    if name == "linalg_vector_norm":
        # An error of the sum of squares is half as large, relatively, in its root.
        square = terms.square()
        return [_one_chain(square, dims).mul_(results[0].flatten()).div_(square.sum(dims).flatten().mul_(2)).nan_to_num_(0.0)]
    deviations = terms.sub(terms.mean(dims, keepdim=True)).square_()
    mean = _one_chain(terms, dims).div_(length)
    # Deviations from a mean that is off are too large by its error squared: all there is where values nearly tie.
    errors: list[torch.Tensor | None] = [_one_chain(deviations, dims).div_(length).add_(mean.square())]
    return errors if name == "var" else [*errors, mean]


def _one_chain(terms: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The error of adding the terms along ``dims`` one by one in fp32, flattened."""
    kept = [d for d in range(terms.dim()) if d not in dims]
    rows = terms.permute(*dims, *kept).reshape(math.prod(terms.shape[d] for d in dims), -1)
    total = torch.zeros(rows.shape[1], dtype=torch.float32)
    for row in rows.float():
        total.add_(row)
    error = total.double().sub_(rows.sum(0)).nan_to_num_(0.0, 0.0, 0.0)
    # A chain may be lucky as well: none counts as better than the chains of this sum are on the whole.
    size = rows.abs().sum(0).nan_to_num_(0.0, 0.0, 0.0)
    typical = error.div(size).nan_to_num_(0.0, 0.0, 0.0).square_().mean().sqrt_()
    return torch.maximum(error.abs(), size.mul_(typical)).copysign_(error)


def moved(value: torch.Tensor, unit: float, generator: torch.Generator) -> torch.Tensor:
    """The values, each by up to some ``unit`` of itself larger or smaller; zeros, signs and layout stay."""
    factor = torch.rand(value.shape, generator=generator).sub_(0.5).double().mul_(2 * _WIDTH * unit).add_(1)
    result = factor.mul_(value)
    if result.stride() == value.stride():
        return result
    # A region may view its input as another shape, which only some layouts allow.
    return torch.empty_like(value, dtype=torch.float64).copy_(result)


def input_unit(dtype: torch.dtype) -> float:
    """How well an input is known: to one rounding of what sums are kept in, for its own digits are given."""
    return min(ROUNDOFF[dtype], _SUMS)


class Spread:
    """Root mean square of how far several runs are from the truth, element by element."""

    def __init__(self, truth: Sequence[torch.Tensor]):
        self.truth, self.runs = truth, 0
        self.squares = [torch.zeros(t.shape, dtype=torch.float64) for t in truth]

    def add(self, outputs: Sequence[torch.Tensor]) -> None:
        for square, truth, output in zip(self.squares, self.truth, outputs, strict=True):
            difference = output.double() - truth
            square.addcmul_(difference, difference)
        self.runs += 1

    def result(self) -> list[torch.Tensor]:
        return [square.div_(max(self.runs, 1)).sqrt_() for square in self.squares]


def of_region(
    region: dict[str, Any], wide: dict[str, Any], inputs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor], seed: int
) -> list[torch.Tensor]:
    """The noise of each output of a region whose fp64 form is ``wide``."""
    units = [_unit(node["value"]) for node in region["nodes"]]
    spread, noise = Spread(truth), Noise(torch.Generator(), _SUMS)

    def before(node: int) -> None:
        noise.unit = units[node]

    for run in range(RUNS):
        generator = torch.Generator().manual_seed((seed * 31 + run) % (1 << 63))
        noise.rewind(generator, run)
        given = [moved(t.double(), input_unit(t.dtype), generator) if t.is_floating_point() else t for t in inputs]
        with noise:
            spread.add(regions.run(wide, given, before))
    return spread.result()


def _unit(value: Any) -> float:
    """Unit roundoff of the first float type in the description of a value."""
    if isinstance(value, dict):
        dtype = DTYPES.get(value["dtype"]) if isinstance(value.get("dtype"), str) else None
        return ROUNDOFF[dtype] if dtype in ROUNDOFF else next((u for v in value.values() if (u := _unit(v))), 0.0)
    if isinstance(value, list):
        return next((u for v in value if (u := _unit(v))), 0.0)
    return 0.0


def neighbour(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """In the values' own type: each, at random, as it is or one step up or down; zeros stay."""
    step = torch.randint(-1, 2, value.shape, generator=generator)
    toward = torch.where(step > 0, math.inf, -math.inf).to(value.dtype)
    return torch.where((step == 0) | (value == 0) | ~torch.isfinite(value), value, torch.nextafter(value, toward))

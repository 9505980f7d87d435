"""Runs the mutants of a region on one set of inputs; the judge looks at what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import mutants, tensors
from . import region as regions
from .mutants import Known, Mutant
from .reductions import Unsuited


def names(body: dict[str, Any]) -> dict[str, Any]:
    """The mutants of a region, by number."""
    return {"mutants": [{"kind": m.kind, "name": m.name} for m in mutants.plan(body["region"], body["most"], body["seed"])]}


def outputs(body: dict[str, Any]) -> dict[str, Any]:
    """Writes the outputs of the wanted mutants on one set.

    ``outputs`` is null for a mutant that does not exist on these shapes. With ``wide`` they are those
    of its fp64 form."""
    region, wide = body["region"], bool(body["wide"])
    planned, folder = mutants.plan(region, body["most"], body["seed"]), Path(body["dir"])
    folder.mkdir(parents=True, exist_ok=True)
    inputs = [tensors.read(t) for t in body["inputs"]]
    others = [[tensors.read(t) for t in one] for one in body["others"]]
    if wide:
        region = regions.widen(region)
        inputs, others = [_wide(t) for t in inputs], [[_wide(t) for t in one] for one in others]
    made = []
    for number, result in _results(region, inputs, others, {n: planned[n] for n in body["wanted"]}):
        files = None
        if result is not None and (result := _as_described(region, result)) is not None:
            files = [tensors.write(t.contiguous(), folder / f"mutant{number}-{i}") for i, t in enumerate(result)]
        made.append({"mutant": number, "outputs": files})
    return {"made": made}


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _as_described(region: dict[str, Any], outputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """In the element types of the region's outputs: a kernel has no other. ``None`` for another shape."""
    metas = [region["nodes"][i]["value"]["tensor"] for i in region["outputs"]]
    if any(list(t.shape) != meta["shape"] for t, meta in zip(outputs, metas)):
        return None
    return [t.to(tensors.DTYPES[meta["dtype"]]) for t, meta in zip(outputs, metas)]


def _results(
    region: dict[str, Any], inputs: list[torch.Tensor], others: Sequence[Sequence[torch.Tensor]], wanted: dict[int, Mutant]
) -> Iterator[tuple[int, list[torch.Tensor] | None]]:
    """Outputs of each mutant. One walk through the right form serves all that differ from some node on."""
    values: dict[int, Any] = {}
    at: dict[int, list[int]] = {}
    for number, mutant in wanted.items():
        if mutant.node is not None:
            at.setdefault(mutant.node, []).append(number)
    for node in regions.walk(region, inputs, values):
        for number in at.get(node, ()):
            yield number, _attempt(lambda m=wanted[number], node=node: _from_node(region, inputs, m, node, dict(values)))
    known = Known(inputs, [values[i] for i in region["outputs"]], others)
    for number, mutant in wanted.items():
        if mutant.inputs is not None:
            yield number, _attempt(lambda m=mutant: regions.run(region, m.inputs(inputs)))
        elif mutant.outputs is not None:
            yield number, _attempt(lambda m=mutant: m.outputs(known))


def _from_node(region: dict[str, Any], inputs: list[torch.Tensor], mutant: Mutant, node: int, values: dict[int, Any]) -> list[torch.Tensor]:
    def call(number: int, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return mutant.call(function, args, kwargs) if number == node else function(*args, **kwargs)

    return regions.run(region, inputs, call=call, first=node, values=values)


def _attempt(run: Any) -> list[torch.Tensor] | None:
    """``None`` where the change can't be made, or the rest of the region refuses it."""
    try:
        with torch.no_grad():
            return run()
    except (Unsuited, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None

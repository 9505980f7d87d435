"""Whether a model comes back whole: every region put where a package would put its kernel, as its own operators.

This is what a package does, with kernels that can't be wrong. What differs then is the way there and
back: the partition, the search for the places, the rewriting, the recompiling for other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from . import backend, rewrite
from .region import to_graph_module


class PutBack:
    """The regions of a model, and how often each was found in what was compiled."""

    def __init__(self, regions: Sequence[dict[str, Any]]):
        self.table = [(region, _stand_in(region), ()) for region in regions]
        self.places = [0] * len(regions)
        #: For each compiled graph the nodes that gave way to a call.
        self.replaced: list[set[str]] = []
        self.fallbacks: list[str] = []

    def compile(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """The model with its regions replaced."""
        torch._dynamo.reset()
        return backend.compile_model(model, backend.aot_backend(self._transform, "eager", None, self.fallbacks.append))

    def _transform(self, gm: fx.GraphModule, _inputs: Sequence[Any], constant: list[bool]) -> fx.GraphModule:
        before = {node.name for node in gm.graph.nodes}
        for index, count in enumerate(rewrite.apply(gm, self.table, constant)):
            self.places[index] += count
        self.replaced.append(before - {node.name for node in gm.graph.nodes})
        return gm

    def missed(self, occurrences: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
        """The regions of which a place was left as it was. A place may as well have gone to a larger region.

        Graphs are compiled in the order in which they were captured.
        """
        replaced = [*self.replaced, set()]
        return [
            region["id"]
            for (region, _, _), places in zip(self.table, occurrences, strict=True)
            if any(not replaced[min(place["graph"], len(self.replaced))].issuperset(place["nodes"]) for place in places)
        ]


def _stand_in(region: dict[str, Any]) -> Callable[..., Any]:
    forward = to_graph_module(region).forward

    def call(*inputs: torch.Tensor) -> Any:
        results = forward(*inputs)
        return results[0] if len(results) == 1 else tuple(results)

    call.__name__ = call.__qualname__ = f"r_{region['id']}"
    call.__module__ = "autokernel_kernels"
    return call


def gradients(call: Callable[..., Any], module: torch.nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor | None]:
    """The gradients of all parameters for one fixed weighing of all outputs; none where the model has no gradient."""
    from .model import flatten

    wanted = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad():
        outputs = [t for t in flatten(call(*inputs[0], **inputs[1])) if t.requires_grad and t.is_floating_point() and t.numel()]
        if not wanted or not outputs:
            return []
        generator = torch.Generator().manual_seed(11)
        seeds = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs]
        return list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))

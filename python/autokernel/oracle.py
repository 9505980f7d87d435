"""The trusted role: runs the user's model for capture, profile, inputs, truths and baselines."""

from __future__ import annotations

import contextlib
import copy
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils import _pytree as pytree

from . import backend, controls, domain, graph, inputs, model, noise, put_back, region, tensors
from .wire import RequestError

# The captured graph calls the same operators in the same element types as the model, so that most
# models come out bit for bit. What may differ is the order of a sum (a product of matrices that is
# called flattened, attention by another kernel), which moves a result by some tens of roundings.
# In 16-bit types each operator rounds its result, whatever it summed in: a few roundings in all.
_EQUAL = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Captured:
    """One ATen graph with the real inputs of its first call in each draw."""

    def __init__(self, gm: fx.GraphModule, constant: list[bool]):
        self.gm = gm
        self.constant = constant
        self.json = graph.to_json(gm, constant)
        self.inputs: dict[int, list[Any]] = {}
        self.calls = 0

    def values(self, draw: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The values of the named nodes on the inputs of that draw; runs only what they need."""
        nodes = {node.name: node for node in self.gm.graph.nodes}
        needed: set[fx.Node] = set()
        pending = [nodes[name] for name in names]
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        wanted = frozenset(names)
        return {node.name: value for node, value, _ in _interpret(self.gm, self.inputs[draw], wanted, needed) if node.name in wanted}


def _interpret(
    gm: fx.GraphModule, args: Sequence[Any], wanted: Collection[str] = (), needed: Collection[fx.Node] | None = None
) -> Iterator[tuple[fx.Node, Any, float]]:
    """Runs a graph node by node; yields each call with its time in microseconds, and with its value where wanted.

    A value dies behind its last reader, and its death counts as that reader's time: so it is in the
    model, and giving large memory back to the system costs as much as a kernel. Nothing else may hold
    a value here, or it would die too late.
    """
    order = [node for node in gm.graph.nodes if node.op != "output" and (needed is None or node in needed)]
    last = {operand: node for node in order for operand in node.all_input_nodes}
    dead: dict[fx.Node, list[fx.Node]] = {}
    for operand, reader in last.items():
        dead.setdefault(reader, []).append(operand)
    given = iter(args)
    values: dict[fx.Node, Any] = {node: next(given) for node in gm.graph.nodes if node.op == "placeholder"}
    results = set(gm.graph.find_nodes(op="output")[0].all_input_nodes)
    with torch.no_grad():
        for node in order:
            call_args, call_kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            start = time.perf_counter_ns()
            if node.op == "get_attr":
                values[node] = graph.attribute(gm, str(node.target))
            elif node.op == "call_function":
                values[node] = node.target(*call_args, **call_kwargs)
            del call_args, call_kwargs
            for operand in dead.get(node, ()):
                if operand not in results:
                    del values[operand]
            elapsed = (time.perf_counter_ns() - start) / 1000
            yield node, values[node] if node.name in wanted else None, elapsed
            if node not in last and node not in results:
                del values[node]


class Oracle:
    """State of one oracle process: one model."""

    def __init__(self) -> None:
        self.loaded: model.LoadedModel | None = None
        self.graphs: list[Captured] = []

    def handlers(self) -> dict[str, Callable[[dict[str, Any], list[int]], dict[str, Any]]]:
        """The operations by name."""
        operations = (
            self.load, self.capture, self.profile, self.put_back, self.region_inputs, self.region_mutants, self.mutant_outputs,
            self.model_truth,
        )
        return {op.__name__: (lambda body, _fds, op=op: op(body)) for op in operations}

    def model(self) -> model.LoadedModel:
        if self.loaded is None:
            raise RequestError("not_loaded", "`load` comes first")
        return self.loaded

    def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Loads the model and runs it once, so that what cannot work is said early."""
        if threads := body.get("threads"):
            torch.set_num_threads(threads)
        self.loaded, self.graphs = None, []
        loaded = model.load(body["model"], body.get("inputs") or (), body.get("seed", 0))
        self.loaded = loaded
        self._run(None)
        parameters = loaded.module.parameters() if isinstance(loaded.module, torch.nn.Module) else ()
        given = model.flatten((loaded.args, loaded.kwargs))
        return {
            "name": loaded.name,
            "inputs": [described for t in given if (described := tensors.meta(t)) is not None],
            "parameters": sum(p.numel() for p in parameters),
            "training": False,
        }

    def _run(self, given: model.Inputs | None, function: Callable[..., Any] | None = None) -> list[torch.Tensor]:
        """The outputs of the model (or of a stand-in for it), with its failures blamed on it."""
        loaded = self.model()
        args, kwargs = loaded.fresh_inputs() if given is None else model.copy_inputs(given)
        try:
            with torch.no_grad():
                result = (loaded.module if function is None else function)(*args, **kwargs)
        except Exception as error:
            raise RequestError("model_raises", f"the model raised when it ran: {type(error).__name__}: {error}") from error
        outputs = model.flatten(result)
        if not outputs:
            raise RequestError("not_tensor_output", f"the model returns no tensor, but {type(result).__name__}")
        return [t.detach() for t in outputs]

    def capture(self, body: dict[str, Any]) -> dict[str, Any]:
        """Captures the graphs, and makes sure that they are the model."""
        loaded = self.model()
        first = self._run(None)
        second = loaded.draw(loaded.seed + 1)
        expected = {0: first, 1: self._run(second)}
        if any(not torch.isfinite(t).all() for outputs in expected.values() for t in outputs if t.is_floating_point()):
            raise RequestError("non_finite", "the model's outputs hold NaN or infinity; nothing can be compared with them")
        if not all(_same_bits(a, b) for a, b in zip(first, self._run(None))):
            raise RequestError("not_deterministic", "two runs of the model on the same inputs differ; fix its seeds, or its state")
        breaks: list[dict[str, Any]] = []
        compiled, phase = self._compile(breaks)
        errors = []
        for draw, given in ((0, None), (1, second)):
            phase.draw = draw
            outputs = self._run(given, compiled)
            errors += [_error(a, b) for a, b in zip(outputs, expected[draw], strict=True)]
        breaks += _graph_breaks()
        return {
            "graphs": [captured.json for captured in self.graphs],
            "breaks": breaks,
            "outputs": [tensors.meta(t) for t in first],
            "equal": {"max_relative_error": max(e for e, _ in errors), "ok": all(ok for _, ok in errors)},
            "non_finite": False,
            "deterministic": True,
        }

    def _compile(self, breaks: list[dict[str, Any]]) -> tuple[Callable[..., Any], _Phase]:
        self.graphs = []
        by_module: dict[int, Captured] = {}
        phase = _Phase()

        def record(gm: fx.GraphModule, _inputs: Sequence[Any], constant: list[bool]) -> fx.GraphModule:
            if phase.draw == 0:
                # A graph that only the second draw needs is not part of the example.
                captured = by_module[id(gm)] = Captured(gm, constant)
                self.graphs.append(captured)
            return gm

        def observe(gm: fx.GraphModule, args: Sequence[Any]) -> None:
            captured = by_module.get(id(gm))
            if captured is None:
                return
            if phase.draw == 0:
                captured.calls += 1
            if phase.draw not in captured.inputs:
                # Clones: the model may write to what it gave. Parameters are kept as they are.
                pairs = zip(args, captured.constant)
                captured.inputs[phase.draw] = [a if c or not isinstance(a, torch.Tensor) else a.detach().clone() for a, c in pairs]

        def fell_back(reason: str) -> None:
            if self.graphs and not self.graphs[-1].calls:
                self.graphs.pop()
            breaks.append({"reason": f"no usable ATen graph: {reason}", "file": None, "line": None})

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        target = self.model().module
        return backend.compile_model(target, backend.aot_backend(record, "eager", observe, fell_back)), phase

    def profile(self, body: dict[str, Any]) -> dict[str, Any]:
        """Median time of each node, and of the whole model, measured in turns."""
        repeats = max(int(body.get("repeats", 5)), 1)
        loaded = self.model()
        totals: list[float] = []
        times: list[dict[str, list[float]]] = [{} for _ in self.graphs]
        for repeat in range(-1, repeats):  # the first round warms up
            args, kwargs = loaded.fresh_inputs()
            with torch.no_grad():
                start = time.perf_counter_ns()
                loaded.module(*args, **kwargs)
                total = (time.perf_counter_ns() - start) / 1000
            for captured, nodes in zip(self.graphs, times):
                for node, _, elapsed in _interpret(captured.gm, captured.inputs[0]) if 0 in captured.inputs else ():
                    if repeat >= 0 and node.op == "call_function":
                        nodes.setdefault(node.name, []).append(elapsed * captured.calls)
            if repeat >= 0:
                totals.append(total)
        medians = [{"nodes": {name: statistics.median(samples) for name, samples in nodes.items()}} for nodes in times]
        return {"total_us": statistics.median(totals), "graphs": medians}

    def put_back(self, body: dict[str, Any]) -> dict[str, Any]:
        """Puts the given regions back as their own operators; says what was not found again and whether the model is the same."""
        loaded = self.model()
        attempt = put_back.PutBack(body["regions"])
        compiled = attempt.compile(loaded.module)
        errors = []
        for given in (None, loaded.draw(loaded.seed + 1)):
            expected = self._run(given)
            errors += [_error(a, b) for a, b in zip(self._run(given, compiled), expected, strict=True)]
        missed, with_gradients = attempt.missed(body["occurrences"]), None
        if isinstance(loaded.module, torch.nn.Module):
            with_gradients = self._same_gradients(compiled)
        return {
            "missed": missed,
            "fallbacks": attempt.fallbacks,
            "equal": {"max_relative_error": max(e for e, _ in errors), "ok": all(ok for _, ok in errors)},
            "gradients": with_gradients,
        }

    def _same_gradients(self, compiled: Callable[..., Any]) -> dict[str, Any] | None:
        """The same question for the gradients; none where the model itself has none."""
        loaded = self.model()
        try:
            expected = put_back.gradients(loaded.module, loaded.module, loaded.fresh_inputs())
        except Exception:  # noqa: BLE001: many a model is made for inference only
            return None
        if not expected:
            return None
        found = put_back.gradients(compiled, loaded.module, loaded.fresh_inputs())
        errors = [_error(a, b) if a is not None and b is not None else (0.0, (a is None) == (b is None)) for a, b in zip(found, expected)]
        return {"max_relative_error": max(e for e, _ in errors), "ok": all(ok for _, ok in errors)}

    def region_inputs(self, body: dict[str, Any]) -> dict[str, Any]:
        """Writes input sets of several families with their truths and baselines."""
        occurrence, wanted = body["occurrence"], body["region"]
        if occurrence["graph"] >= len(self.graphs):
            raise RequestError("not_captured", "`capture` comes first")
        captured = self.graphs[occurrence["graph"]]
        names = occurrence["inputs"]
        recorded: list[list[torch.Tensor]] = []
        for draw in (0, 1):
            if draw in captured.inputs:
                values = captured.values(draw, names)
                recorded.append([values[name] for name in names])
        if not recorded:
            raise RequestError("not_captured", "the graph of this region did not run on the example inputs")
        nodes = {node.name: node for node in captured.gm.graph.nodes}
        known = [domain.known_range(nodes[name]) for name in names]
        sets, seed = int(body.get("sets", 10)), int(body.get("seed", 0))
        return inputs.write_sets(wanted, recorded, known, sets, seed, Path(body["dir"]), body.get("other_than"))

    def region_mutants(self, body: dict[str, Any]) -> dict[str, Any]:
        """Lists wrong forms of a region."""
        return controls.names(body)

    def mutant_outputs(self, body: dict[str, Any]) -> dict[str, Any]:
        """Writes what wrong forms of a region give on one set of inputs."""
        return controls.outputs(body)

    def model_truth(self, body: dict[str, Any]) -> dict[str, Any]:
        """The model's outputs in fp64 and in its own types, for each seed of inputs, with their noise.

        All draws are measured against the same kind of truth: where one cannot be widened, none is.
        """
        folder = Path(body["dir"])
        folder.mkdir(parents=True, exist_ok=True)
        seeds = [int(seed) for seed in body["draws"]]
        wide = _widened(self.model().module)
        draws = [self._draw(wide, number, seed, folder) for number, seed in enumerate(seeds)] if wide is not None else [None]
        widened = all(draw is not None for draw in draws)
        if not widened:
            draws = [self._own_draw(number, seed, folder) for number, seed in enumerate(seeds)]
        return {"draws": draws, "widened": widened}

    def _draw(self, wide: Callable[..., Any], number: int, seed: int, folder: Path) -> dict[str, Any] | None:
        given = self.model().draw(seed)
        own = self._run(given)
        truth = _run_wide(wide, given, own)
        if truth is None:
            return None
        unit = max((noise.ROUNDOFF.get(t.dtype, 0.0) for t in own), default=0.0)
        spread, roundings = noise.Spread(truth), noise.Noise(torch.Generator(), unit)
        for run in range(noise.RUNS):
            roundings.rewind(torch.Generator().manual_seed((seed * 31 + run) % (1 << 63)), run)
            if (outputs := _run_wide(wide, given, own, roundings)) is not None:
                spread.add(outputs)
        return _write_draw(folder, number, truth, own, spread)

    def _own_draw(self, number: int, seed: int, folder: Path) -> dict[str, Any]:
        """Without fp64 the noise is seen by running the model again with inputs and weights one step of
        their own type away: every rounding in it then falls differently."""
        loaded = self.model()
        given = loaded.draw(seed)
        own = self._run(given)
        truth = [t.double() for t in own]
        spread = noise.Spread(truth)
        for run in range(noise.RUNS):
            generator = torch.Generator().manual_seed((seed * 31 + run) % (1 << 63))
            with _stepped(loaded.module, generator):
                args, kwargs = pytree.tree_map(lambda v: _step(v, generator), model.copy_inputs(given))
                try:
                    with torch.no_grad():
                        outputs = model.flatten(loaded.module(*args, **kwargs))
                except Exception:  # noqa: BLE001: a model may refuse values that it was not given
                    continue
            if len(outputs) == len(own) and all(a.shape == b.shape for a, b in zip(outputs, own)):
                spread.add(outputs)
        return {**_write_draw(folder, number, truth, own, spread), "own_types": True}


class _Phase:
    """Which draw of inputs is running."""

    draw = 0


def _write_draw(folder: Path, number: int, truth: list[torch.Tensor], own: list[torch.Tensor], spread: noise.Spread) -> dict[str, Any]:
    def store(kind: str, values: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        return [tensors.write(t.contiguous(), folder / f"draw{number}-{kind}{i}") for i, t in enumerate(values)]

    known = spread.result() if spread.runs else []
    return {"truth": store("truth", truth), "baseline": store("baseline", own), "noise": store("noise", known)}


def _step(value: Any, generator: torch.Generator) -> Any:
    real = isinstance(value, torch.Tensor) and value.dtype in noise.ROUNDOFF
    return noise.neighbour(value, generator) if real else value


@contextlib.contextmanager
def _stepped(module: Any, generator: torch.Generator) -> Iterator[None]:
    """Weights one step away; put back afterwards, bit for bit."""
    kept = [(p, p.detach().clone()) for p in module.parameters()] if isinstance(module, torch.nn.Module) else []
    try:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(_step(value, generator))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _error(result: torch.Tensor, expected: torch.Tensor) -> tuple[float, bool]:
    """Root mean square of the difference over that of the expected values, and whether it is small enough."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return float(torch.finfo(torch.float64).max), False
    if not expected.dtype.is_floating_point:
        same = torch.equal(result, expected)
        return (0.0 if same else 1.0), same
    difference = torch.linalg.vector_norm(result.double() - expected.double()).item()
    scale = torch.linalg.vector_norm(expected.double()).item()
    error = difference / scale if scale > 0 else difference
    if error != error or error in (float("inf"),):
        return float(torch.finfo(torch.float64).max), False
    return error, error <= _EQUAL.get(expected.dtype, 1e-5)


def _graph_breaks() -> list[dict[str, Any]]:
    """What Dynamo could not trace, with the user's line where it is known."""
    from torch._dynamo.utils import counters, graph_break_reasons

    found: list[tuple[str, str | None, int | None]] = []
    for entry in graph_break_reasons:
        # The innermost line of the user's own code says more than one inside torch.
        frames = [f for f in entry.user_stack if not f.filename.startswith(_TORCH)] or entry.user_stack
        found.append((_reason(entry.reason), frames[-1].filename if frames else None, frames[-1].lineno if frames else None))
    for text in counters["unimplemented"]:
        # A break inside a loop loses the whole function, without an entry of its own.
        if match := _SKIPPED.search(str(text)):
            found.append((f"{_reason(str(text))} (the whole function is left out)", match[1], int(match[2])))
    known = {reason for reason, _, _ in found}
    for text in counters["graph_break"]:
        if _reason(str(text)) not in known:
            found.append((_reason(str(text)), None, None))
    return [dict(zip(("reason", "file", "line"), entry)) for entry in dict.fromkeys(found)]


def _reason(text: str) -> str:
    """Dynamo's title and its explanation, on one line of bounded length."""
    explanation = _EXPLANATION.search(text)
    title = text.splitlines()[0] if text else "unknown"
    return (f"{title}: {explanation[1]}" if explanation else title)[:300]


_TORCH = str(Path(torch.__file__).parent)
_SKIPPED = re.compile(r"frame skipped: .*? \((.+) line (\d+)\)")
_EXPLANATION = re.compile(r"Explanation: (.+)")


class _Wide(TorchDispatchMode):
    """Turns every request for a narrower float type into one for fp64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            if not isinstance(value, torch.dtype):
                return value
            # 8-bit floats stay: choosing a code is part of the function.
            return torch.float64 if value in (torch.float32, torch.float16, torch.bfloat16) else value

        args, kwargs = pytree.tree_map(widen, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widened(module: Callable[..., Any]) -> Callable[..., Any] | None:
    """A deep copy in fp64; a function is taken as it is."""
    if not isinstance(module, torch.nn.Module):
        return module
    try:
        return copy.deepcopy(module).double()
    except Exception:  # noqa: BLE001: a model that cannot be copied is judged in its own types
        return None


def _run_wide(
    wide: Callable[..., Any], given: model.Inputs, own: list[torch.Tensor], roundings: noise.Noise | None = None
) -> list[torch.Tensor] | None:
    """The fp64 outputs, or ``None`` where some part of the model stayed narrow."""

    def widen(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if roundings is None or value.dtype not in noise.ROUNDOFF:
            return value.double()
        return noise.moved(value.double(), noise.input_unit(value.dtype), roundings.generator)

    args, kwargs = pytree.tree_map(widen, model.copy_inputs(given))
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.no_grad(), _Wide(), roundings or contextlib.nullcontext():
            outputs = model.flatten(wide(*args, **kwargs))
    except Exception:  # noqa: BLE001: any failure means that this model has no fp64 form
        return None
    finally:
        torch.set_default_dtype(default)
    fits = len(outputs) == len(own) and all(
        w.shape == o.shape and (w.dtype == torch.float64 if o.is_floating_point() else True) for w, o in zip(outputs, own)
    )
    return [t.double() for t in outputs] if fits else None

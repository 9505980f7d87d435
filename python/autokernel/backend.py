"""The one backend: Dynamo's graph, AOTAutograd's functional ATen graph, ``transform``, run.

Capture, baselines and packages all come through here, so that what was captured is what will be
deployed. There is no decomposition table. Operators that AOTAutograd would take apart by itself
although libraries have one kernel for them (linear, attention, upsampling) stay whole as long as no
gradient is wanted; with gradients their derivative is that of their parts, so they come in parts.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import fx

log = logging.getLogger("autokernel")

Transform = Callable[[fx.GraphModule, Sequence[Any], "list[bool]"], fx.GraphModule]
Observer = Callable[[fx.GraphModule, Sequence[Any]], None]
Rest = Literal["eager", "inductor"]

_WHOLE = (
    "linear.default",
    "scaled_dot_product_attention.default",
    "upsample_linear1d.vec",
    "upsample_bilinear2d.vec",
    "upsample_trilinear3d.vec",
    "upsample_bicubic2d.vec",
    "upsample_nearest1d.vec",
    "upsample_nearest2d.vec",
    "upsample_nearest3d.vec",
)


class StopBeforeRun(BaseException):
    """Compiling is done, and running was not wanted.

    No ``Exception``: neither a model's own ``except Exception`` nor our way back to the Dynamo graph
    may swallow it.
    """


class _Switch:
    """A process-wide flag that is also a context manager."""

    on: bool = False

    def __enter__(self) -> _Switch:
        self.on = True
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False


COMPILE_ONLY = _Switch()


def aot_backend(
    transform: Transform,
    rest: Rest = "eager",
    observe: Observer | None = None,
    on_fallback: Callable[[str], None] | None = None,
) -> Callable[..., Any]:
    """A backend for ``torch.compile`` that shows every functional ATen graph to ``transform``.

    ``transform(gm, example_inputs, constant)`` gets fake inputs in the order of the placeholders, and
    ``constant[i]`` says whether placeholder ``i`` is a parameter or buffer that the graph does not
    write to. It may change ``gm`` in place and returns the graph to run. ``rest`` says how that runs:
    operator by operator, or compiled by inductor at the first call. ``observe`` sees the real inputs
    of each run. Where AOTAutograd fails, or its graph fails at its first run, the plain Dynamo graph
    runs instead and ``on_fallback`` hears why.
    """

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        from torch._dynamo.exc import RestartAnalysis
        from torch._functorch.aot_autograd import aot_module_simplified

        constant = _constant_inputs(gm, example_inputs)

        def forward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            _drop_aliases(graph)
            return _Runner(transform(graph, inputs, _constant_placeholders(graph, constant)), rest, observe)

        def backward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return _Runner(graph, rest, None)

        def fell_back(error: Exception) -> None:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("the ATen graph cannot be used, the Dynamo graph runs instead (%s)", reason)
            if on_fallback is not None:
                on_fallback(reason)

        try:
            with _whole_operators(gm, example_inputs):
                compiled = aot_module_simplified(
                    gm, example_inputs, fw_compiler=forward, bw_compiler=backward, inference_compiler=forward
                )
        except (TransformError, RestartAnalysis):
            raise
        except Exception as error:  # noqa: BLE001: the Dynamo graph is the way back from anything
            fell_back(error)
            return _stoppable(gm.forward)
        return _Proving(compiled, gm, fell_back)

    return backend


class TransformError(RuntimeError):
    """A transform may raise this (or a subclass) to end the compilation instead of losing the graph."""


class _Runner:
    """Runs a transformed graph; called by AOTAutograd with a list of inputs."""

    _boxed_call = True

    def __init__(self, gm: fx.GraphModule, rest: Rest, observe: Observer | None):
        self.gm, self.rest, self.observe = gm, rest, observe
        self.symbolic = any(
            isinstance(node.meta.get("val"), torch.SymInt) for node in gm.graph.nodes if node.op == "placeholder"
        )
        self.compiled: dict[Any, Callable[..., Any]] = {}
        if rest == "eager":
            self.compiled[None] = gm.forward

    def __call__(self, args: Sequence[Any]) -> Any:
        # A graph with symbolic sizes is compiled once for each combination that occurs.
        key = tuple(a if isinstance(a, int) else None for a in args) if self.symbolic and self.rest == "inductor" else None
        run = self.compiled.get(key)
        if run is None:
            run = self.compiled[key] = _inductor(self.gm, args)
        if COMPILE_ONLY.on:
            raise StopBeforeRun
        if self.observe is not None:
            self.observe(self.gm, args)
        return run(*args)


class _Proving:
    """AOTAutograd's function until it has run once without an error; the Dynamo graph if it can't."""

    def __init__(self, compiled: Callable[..., Any], gm: fx.GraphModule, fell_back: Callable[[Exception], None]):
        self.run, self.gm, self.fell_back, self.proven = compiled, gm, fell_back, False

    def __call__(self, *args: Any) -> Any:
        if self.proven:
            return self.run(*args)
        try:
            result = self.run(*args)
        except Exception as error:  # noqa: BLE001: whatever it is, the Dynamo graph decides
            self.fell_back(error)
            self.run = _stoppable(self.gm.forward)
            result = self.run(*args)
        self.proven = True
        return result


def _stoppable(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if COMPILE_ONLY.on:
            raise StopBeforeRun
        return run(*args)

    return call


def _inductor(gm: fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
    """``gm`` compiled by inductor for these inputs; inductor brings its own decompositions."""
    from torch._inductor.compile_fx import compile_fx
    from torch.utils._python_dispatch import _disable_current_modes

    copied = fx.Graph()
    output = copied.graph_copy(gm.graph, {})
    copied.output(tuple(output))
    # Fake tensors of the first tracing belong to a mode that is closed.
    for node in copied.nodes:
        node.meta = {}
    fresh = fx.GraphModule(gm, copied)
    # AOTAutograd runs a graph for the first time under a mode that inspects operators; tracing there fails.
    with torch.no_grad(), _disable_current_modes():
        return compile_fx(fresh, list(args))


def stock_inductor() -> Callable[..., Any]:
    """Inductor as ``torch.compile`` uses it, but obeying ``COMPILE_ONLY``."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        return _stoppable(compile_fx(gm, example_inputs))

    return backend


def compile_model(model: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` for the shapes that come: regions are matched by their exact shapes."""
    return torch.compile(model, backend=backend, dynamic=False)


def compile_ahead(compiled: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> bool:
    """Compiles without running a kernel; says whether there was something to stop.

    A model with graph breaks is compiled up to its first break: what comes behind it can be traced
    only once the first part has run.
    """
    try:
        with COMPILE_ONLY, torch.no_grad():
            compiled(*args, **(kwargs or {}))
    except StopBeforeRun:
        return True
    return False


class codegen_threads:  # noqa: N801: used like a function
    """From now on inductor generates code for ``threads`` threads, and compiles in this process.

    The process itself may run with one thread, so that it has no OpenMP pool and can be forked. Takes
    effect at once; as a context manager it restores what was before.
    """

    def __init__(self, threads: int):
        # A pool of compile workers would be threads and children in a process that is to be forked.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        from torch._inductor import config

        self._before = (config.compile_threads, config.cpp.threads)
        config.compile_threads = 1
        config.cpp.threads = threads

    def __enter__(self) -> codegen_threads:
        return self

    def __exit__(self, *_: object) -> None:
        from torch._inductor import config

        config.compile_threads, config.cpp.threads = self._before


def _constant_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[bool]:
    """Which inputs of a Dynamo graph are parameters or buffers of a module."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [
        isinstance(value, torch.nn.Parameter) or _source_is_buffer(node)
        for node, value in zip(placeholders, example_inputs)
    ]


def _source_is_buffer(node: fx.Node) -> bool:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    name = str(name() if callable(name) else name)
    return "._buffers[" in name or "._parameters[" in name


def _constant_placeholders(graph: fx.GraphModule, constant: Sequence[bool]) -> list[bool]:
    """The same for the placeholders of AOTAutograd's graph, without inputs that the graph changes."""
    from torch._guards import TracingContext

    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    context = TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    mutated = [info.mutates_data for info in metadata.input_info] if metadata is not None else []
    flags = []
    for position, node in enumerate(placeholders):
        description = node.meta.get("desc")
        # Without a description the order is the inputs' own, as long as nothing was added or dropped.
        index = getattr(description, "idx", None) if description is not None else position
        known = isinstance(index, int) and index < len(constant) and (description is not None or len(placeholders) == len(constant))
        flags.append(known and constant[index] and not (index < len(mutated) and mutated[index]))
    return flags


def _drop_aliases(graph: fx.GraphModule) -> None:
    """Takes out nodes that only pass a tensor on: in a functional graph they mean nothing.

    What the graph returns is left alone: AOTAutograd has counted on which outputs are aliases.
    """
    for node in list(graph.graph.nodes):
        passes_on = node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
        if passes_on and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()


@contextlib.contextmanager
def _whole_operators(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[None]:
    """Keeps the operators of ``_WHOLE`` in one piece where no gradient is wanted."""
    wants_gradient = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    changes_mode = any(node.target is torch._C._set_grad_enabled for node in gm.graph.nodes)
    try:
        from torch.export.exported_program import _override_composite_implicit_decomp as override
    except ImportError:
        override = None
    if override is None or wants_gradient or changes_mode:
        yield
        return

    def keep(*_: Any, **__: Any) -> Any:
        return NotImplemented

    operators = {}
    for name in _WHOLE:
        packet, overload = name.split(".")
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if found is not None and torch._C._dispatch_has_kernel_for_dispatch_key(found.name(), "CompositeImplicitAutograd"):
            operators[found] = keep
    with override(operators):
        yield

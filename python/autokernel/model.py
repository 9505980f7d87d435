"""Loads the user's model, and draws inputs for it.

A model is named ``file.py``, ``file.py:Name``, ``package.module:Name`` or ``program.pt2``. Without a name,
a file offers either ``build()``, which returns the model and its inputs, or ``Model`` with ``get_inputs``
and optionally ``get_init_inputs``. Inputs are a tuple or list of positional arguments, a dict of keyword
arguments, a tuple of both (``((x, y), {"mask": m})``), or one tensor. All factories run under fixed seeds.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .wire import RequestError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# Inputs drawn right after the weights from the same generator state would repeat the weights' numbers.
_INPUT_STREAM = 0x5EED_0000_0000
_DTYPE = {
    name: getattr(torch, name) for name in "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()
}


@dataclasses.dataclass
class LoadedModel:
    """What one runs: ``module(*args, **kwargs)``. ``draw(seed)`` gives other inputs of the same shapes."""

    module: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draw: Callable[[int], Inputs]
    name: str
    seed: int

    def fresh_inputs(self) -> Inputs:
        """A deep copy: a model may write to its inputs."""
        return copy_inputs((self.args, self.kwargs))

    def run(self, inputs: Inputs | None = None) -> list[torch.Tensor]:
        """Runs the model on copies, without gradients; the tensors of its result in order."""
        args, kwargs = self.fresh_inputs() if inputs is None else copy_inputs(inputs)
        with torch.no_grad():
            return flatten(self.module(*args, **kwargs))


def load(spec: str, inputs: Sequence[str] = (), seed: int = 0) -> LoadedModel:
    """Imports, builds and draws. Every failure is a ``RequestError`` of a kind that the parent knows."""
    if spec.endswith(".pt2"):
        return _load_program(spec, inputs, seed)
    where, _, wanted = spec.rpartition(":") if ":" in spec and not spec.endswith(".py") else (spec, "", "")
    namespace, stem = (_import_file(where) if where.endswith(".py") else _import_module(where))
    with _blaming_model(where):
        built, factory = _build(namespace, wanted, where, bool(inputs), seed)
        if not callable(built):
            raise RequestError("no_model", f"{spec}: expected a module or a function, found {type(built).__name__}")
        draw = _drawing(built, inputs, factory, where)
        if isinstance(built, torch.nn.Module):
            built.eval()
        args, kwargs = draw(seed)
    return LoadedModel(built, args, kwargs, draw, wanted or stem, seed)


def _load_program(path: str, inputs: Sequence[str], seed: int) -> LoadedModel:
    """What ``torch.export.save`` wrote. Its own example is the first draw, others are made from it."""
    if not Path(path).is_file():
        raise RequestError("file_not_found", f"no such file: {path}")
    try:
        program = torch.export.load(path)
    except Exception as error:  # noqa: BLE001: a damaged archive may fail in any way
        message = f"{path} is no program that torch.export.load can read: {type(error).__name__}: {error}"
        raise RequestError("no_model", message.splitlines()[0]) from error
    with _blaming_model(path):
        module = program.module()
        example = program.example_inputs
        if inputs or example is None:
            draw = _drawing(module, inputs, None, path)
        else:
            def draw(wanted: int) -> Inputs:
                given = copy_inputs((tuple(example[0]), dict(example[1])))
                with seeded(_INPUT_STREAM + wanted):
                    return given if wanted == seed else pytree.tree_map(_rearranged, given)

        args, kwargs = draw(seed)
    return LoadedModel(module, args, kwargs, draw, Path(path).stem, seed)


def _rearranged(value: Any) -> Any:
    """Another tensor out of the same elements, which are known to be in the model's domain.

    What looks like a mask stays: a row with nothing left in it would give NaN.
    """
    if not isinstance(value, torch.Tensor) or value.numel() < 2 or value.dtype == torch.bool:
        return value
    if value.is_floating_point() and (not torch.isfinite(value).all() or len(torch.unique(value[..., :2])) < 3):
        return value
    moved = value.flatten()[torch.randperm(value.numel())].view(value.shape)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(moved)


def flatten(outputs: Any) -> list[torch.Tensor]:
    """The tensors of a nested result, in order; other leaves don't count."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                found += flatten(getattr(leaf, field.name))
    return found


def copy_inputs(inputs: Inputs) -> Inputs:
    """A deep copy that also takes tensors with a history, which ``copy.deepcopy`` refuses."""
    memo: dict[int, Any] = {}
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and not leaf.is_leaf:
            memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(inputs, memo)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Fixed seeds for torch, random and (where it is installed) numpy."""
    seed %= 1 << 63
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy

        numpy.random.seed(seed % (1 << 32))
    except ImportError:
        pass
    yield


def _import_file(path: str) -> tuple[dict[str, Any], str]:
    file = Path(path).resolve()
    if not file.is_file():
        raise RequestError("file_not_found", f"no such file: {path}")
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # Own prefix: a user's `torch_model.py` or `model.py` must not shadow an installed module.
    name = "autokernel_model_" + re.sub(r"\W", "_", file.stem)
    description = importlib.util.spec_from_file_location(name, file)
    if description is None or description.loader is None:
        raise RequestError("import_error", f"{path} cannot be imported", module=None, interpreter=sys.executable)
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module
    with _blaming_import(path), seeded(0):
        description.loader.exec_module(module)
    return vars(module), file.stem


def _import_module(name: str) -> tuple[dict[str, Any], str]:
    if not name or "/" in name:
        raise RequestError("file_not_found", f"{name or 'the model'} is neither a Python file nor a module's name")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with _blaming_import(name), seeded(0):
        module = importlib.import_module(name)
    return vars(module), name.rpartition(".")[2]


@contextlib.contextmanager
def _blaming_import(where: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise RequestError(
            "import_error",
            f"{where} needs the module `{error.name}`, which {sys.executable} does not have",
            module=error.name,
            interpreter=sys.executable,
        ) from error
    except (ImportError, SyntaxError) as error:
        message = f"{where} cannot be imported: {type(error).__name__}: {error}"
        raise RequestError("import_error", message, module=getattr(error, "name", None), interpreter=sys.executable) from error
    except (Exception, SystemExit) as error:  # noqa: BLE001
        raise RequestError("model_raises", f"{where} raised while it was imported: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _blaming_model(where: str) -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001
        raise RequestError("model_raises", f"{where} raised: {type(error).__name__}: {error}") from error


def _build(namespace: dict[str, Any], wanted: str, where: str, given_inputs: bool, seed: int) -> tuple[Any, Callable[[], Any] | None]:
    """The model, and the function that gives its inputs if there is one."""
    if wanted:
        if wanted not in namespace:
            names = sorted(n for n, v in namespace.items() if callable(v) and getattr(v, "__module__", None) == namespace.get("__name__"))
            raise RequestError("no_model", f"{where} has no `{wanted}`; it defines {', '.join(names) or 'nothing callable'}")
        return _build_named(namespace, namespace[wanted], given_inputs, seed)
    if callable(namespace.get("build")):
        return _build_factory(namespace["build"], seed)
    if "Model" in namespace:
        if not given_inputs and not callable(namespace.get("get_inputs")):
            raise RequestError("no_model", f"{where} has `Model` but no `get_inputs()`; add it, or name the inputs with --input")
        return _build_named(namespace, namespace["Model"], given_inputs, seed)
    raise RequestError("no_model", f"{where} has neither `build()` nor `Model` with `get_inputs()`; name what to use as {where}:NAME")


def _build_named(namespace: dict[str, Any], found: Any, given_inputs: bool, seed: int) -> tuple[Any, Callable[[], Any] | None]:
    get_inputs = None if given_inputs else namespace.get("get_inputs")
    with seeded(seed):
        if isinstance(found, type):
            given = callable(namespace.get("get_init_inputs"))
            lacking = [] if given else _required(found)
            if lacking:
                raise RequestError(
                    "no_model",
                    f"`{found.__name__}` needs {', '.join(lacking)} to be made; add `get_init_inputs()`, or name a function that makes it",
                )
            args, kwargs = _as_call(namespace["get_init_inputs"]()) if given else ((), {})
            return found(*args, **kwargs), get_inputs
        if isinstance(found, torch.nn.Module):
            return found, get_inputs
        if inspect.isfunction(found) and not _required(found):
            return _build_factory(found, seed, get_inputs)
    return found, get_inputs


def _build_factory(
    factory: Callable[[], Any], seed: int, get_inputs: Callable[[], Any] | None = None
) -> tuple[Any, Callable[[], Any] | None]:
    with seeded(seed):
        built = factory()
    if isinstance(built, (tuple, list)) and len(built) == 2 and callable(built[0]):
        return built[0], lambda: factory()[1]
    return built, get_inputs


def _required(function: Callable[..., Any]) -> list[str]:
    """The arguments without which it can't be called."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def _as_call(inputs: Any) -> Inputs:
    if isinstance(inputs, dict):
        return (), dict(inputs)
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], (tuple, list)) and isinstance(inputs[1], dict):
        return tuple(inputs[0]), dict(inputs[1])
    if isinstance(inputs, (list, tuple)):
        return tuple(inputs), {}
    return (inputs,), {}


def _drawing(built: Callable[..., Any], specs: Sequence[str], factory: Callable[[], Any] | None, where: str) -> Callable[[int], Inputs]:
    if specs:
        largest = _index_limit(built)
        parsed = [_parse_input(text) for text in specs]

        def draw(seed: int) -> Inputs:
            with seeded(_INPUT_STREAM + seed):
                made = [(name, _random(shape, dtype, *(limits or (0, largest)), bool(limits))) for name, shape, dtype, limits in parsed]
            return tuple(t for name, t in made if not name), {name: t for name, t in made if name}

        return draw
    if factory is None:
        raise RequestError("no_model", f"{where} gives no inputs for its model; name them with --input, such as --input 1x128:int64")

    def draw_again(seed: int) -> Inputs:
        with seeded(_INPUT_STREAM + seed), _blaming_model(where):
            return _as_call(factory())

    return draw_again


def _parse_input(text: str) -> tuple[str, tuple[int, ...], torch.dtype, tuple[float, float] | None]:
    """Name, shape, element type, and the range of values: from the first to below the second."""
    match = re.fullmatch(r"(?:(\w+)=)?((?:\d+(?:x\d+)*)?)(?::(\w+)(?::(-?[\d.]+?)\.\.(-?[\d.]+))?)?", text.strip())
    if match is None or (match[3] and match[3] not in _DTYPE):
        raise RequestError("no_model", f"input `{text}` is not of the form [NAME=]1x128[:DTYPE[:LOW..HIGH]]; element types: {', '.join(_DTYPE)}")
    shape = tuple(int(size) for size in match[2].split("x") if size)
    limits = (float(match[4]), float(match[5])) if match[4] else None
    if limits is not None and not limits[0] < limits[1]:
        raise RequestError("no_model", f"input `{text}`: the range {match[4]}..{match[5]} holds nothing")
    return match[1] or "", shape, _DTYPE[match[3] or "float32"], limits


def _random(shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float, bounded: bool) -> torch.Tensor:
    if dtype.is_floating_point:
        return (torch.rand(shape) * (high - low) + low if bounded else torch.randn(shape)).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(int(low), int(high), shape, dtype=dtype)


def _index_limit(built: Any) -> int:
    """Whole numbers are most often indices into a table: stay inside the smallest one."""
    tables = [m.num_embeddings for m in built.modules() if isinstance(m, torch.nn.Embedding)] if isinstance(built, torch.nn.Module) else []
    return min([100, *tables])

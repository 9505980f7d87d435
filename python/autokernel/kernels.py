"""From an artefact and its plan to something that Python, autograd and Inductor can call.

A kernel has three faces. `call` goes straight to the machine code and is what a rewritten graph
uses. `operator()` is `torch.ops.autokernel.r_<region>`, complete with fake and autograd kernels,
for graphs and people who want an operator. `inner_operator()` is the same without an autograd
kernel: it costs less than half as much a call, and stands only in graphs below autograd.

Whatever does not fit at the moment of a call (sizes, strides, element types, alignment, gradients
wanted) runs the region's original operators: a kernel is an optimisation, never a condition.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import struct
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import tensors
from .region import to_graph_module

try:  # What Inductor's own code uses: a third of the cost of the public functions.
    from torch._C._dynamo.guards import _empty_strided_cpu, assert_size_stride
except ImportError:  # pragma: no cover - an older or newer torch

    def _empty_strided_cpu(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype)

    def assert_size_stride(item, size, stride, _name=None):
        if item.shape != size or any(s != w for s, w, n in zip(item.stride(), stride, size) if n > 1):
            raise AssertionError("size or stride")


class Unsuitable(Exception):
    """Why a kernel can't be used here; the words end up in a warning."""


def process_wide(name: str) -> dict:
    """A dictionary that all copies of this runtime in one process share (each package has its own)."""
    module = sys.modules.setdefault("_autokernel_process", types.ModuleType("_autokernel_process"))
    return module.__dict__.setdefault(name, {})


# --- what this machine can do -----------------------------------------------------------------


def cpu_features() -> frozenset[str]:
    """The feature words of the kernel's cpuinfo (`flags` on x86-64, `Features` on aarch64)."""
    cache = process_wide("features")
    if "all" not in cache:
        words: frozenset[str] = frozenset()
        try:
            with open("/proc/cpuinfo") as file:
                for line in file:
                    key, _, value = line.partition(":")
                    if key.strip() in ("flags", "Features"):
                        words = frozenset(value.split())
                        break
        except OSError:
            pass
        cache["all"] = words
    return cache["all"]


_MACHINES = {"x86_64": 62, "aarch64": 183}


def _check_elf(data: bytes) -> None:
    """Refuses what the dynamic loader would crash on: it maps what the headers say, and a short file is a bus error."""
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        raise Unsuitable("the artefact is no 64-bit ELF file")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != 3 or machine != _MACHINES.get(platform.machine(), machine):
        raise Unsuitable("the artefact was built for another machine")
    phoff, shoff = struct.unpack_from("<QQ", data, 32)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", data, 54)
    ends = [phoff + phentsize * phnum, shoff + shentsize * shnum]
    if phentsize != 56 or max(ends) > len(data):
        raise Unsuitable("the artefact is cut short or damaged")
    for index in range(phnum):
        offset, _, _, filesz = struct.unpack_from("<QQQQ", data, phoff + index * phentsize + 8)
        if offset + filesz > len(data):
            raise Unsuitable("the artefact is cut short or damaged")


def _load_runtime() -> None:
    """torch's own OpenMP and the maths library, visible to artefacts, which name neither."""
    cache = process_wide("runtime")
    if cache:
        return
    folder = Path(torch.__file__).parent
    found = sorted(folder.glob("lib/libgomp*.so*")) + sorted(folder.parent.glob("torch.libs/libgomp*.so*"))
    # A torch from a distribution links the system's library, which is then loaded already.
    for name in [*map(str, found[:1]), "libm.so.6"] if found else ["libgomp.so.1", "libm.so.6"]:
        try:
            cache[name] = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            cache.clear()
            raise Unsuitable(f"{Path(name).name} can't be loaded: {error}") from None


def load_artefact(path: Path, sha256: str | None = None) -> tuple[ctypes.CDLL, str]:
    """The loaded library and a key for its bytes; raises `Unsuitable`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unsuitable(f"the artefact {path.name} is missing ({error.strerror})") from None
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and digest != sha256:
        raise Unsuitable(f"the artefact {path.name} is not the one that was judged (its hash differs)")
    _check_elf(data)
    _load_runtime()
    try:
        # Not PyDLL: other Python threads run while a kernel does; the difference is 40 ns.
        return ctypes.CDLL(str(path.resolve()), mode=ctypes.RTLD_LOCAL), digest
    except OSError as error:
        raise Unsuitable(f"the artefact {path.name} can't be loaded: {str(error).rpartition(': ')[2]}") from None


# --- the callable -----------------------------------------------------------------------------


def _dims(meta: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(meta["shape"]), tuple(meta["stride"]), tensors.DTYPES[meta["dtype"]]


def output_metas(region: dict[str, Any]) -> list[dict[str, Any]]:
    return [region["nodes"][index]["value"]["tensor"] for index in region["outputs"]]


def _sample(item: torch.Tensor, count: int) -> torch.Tensor:
    """Up to about `count` elements spread over a tensor, as a view."""
    if item.dim() == 0:
        return item
    # A step without a common factor with the row length would be finer; rows and columns are enough here.
    flat = item.detach()
    for axis in range(item.dim()):
        length = item.shape[axis]
        most = max(1, round(count ** (1 / item.dim())))
        flat = flat[(slice(None),) * axis + (slice(None, None, max(1, length // most)),)]
    return flat


def _same_bits(known: torch.Tensor, now: torch.Tensor) -> bool:
    return torch.equal(known, now)


class Prepared:
    """A buffer made from inputs that rarely change: made again when one of them is another tensor, or was written to.

    Tensors of inference mode don't tell whether they were written to; for them there is no buffer. Writes
    through `tensor.data` are not counted by PyTorch: for them some elements, spread over each tensor, are
    looked at in every call. That sees what changes a whole weight (merging an adapter, loading, scaling);
    a write through `.data` to a few elements is seen after `forget()`.
    """

    #: Elements of each tensor that are compared in every call: a few microseconds.
    SAMPLES = 64

    def __init__(self, fill: Callable[..., None], numel: int, dtype: torch.dtype):
        self._fill, self._numel, self._dtype = fill, numel, dtype
        self._made: dict[tuple[int, ...], tuple] = {}

    @property
    def bytes(self) -> int:
        """What the buffers that are kept now take."""
        return sum(entry[2].nbytes for entry in list(self._made.values()))

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | None:
        try:
            state = [(item._version, item.data_ptr()) for item in inputs]
        except RuntimeError:
            return None
        key = tuple(map(id, inputs))
        known = self._made.get(key)
        # An id comes back after its tensor died; the weak references tell.
        samples = [_sample(item, self.SAMPLES) for item in inputs]
        if (
            known is not None
            and known[1] == state
            and all(ref() is item for ref, item in zip(known[0], inputs))
            and all(map(_same_bits, known[3], samples))
        ):
            return known[2]
        buffer = self._make(inputs)
        forget = self._made.pop
        kept = [item.clone() for item in samples]
        self._made[key] = ([weakref.ref(item, lambda _: forget(key, None)) for item in inputs], state, buffer, kept)
        return buffer

    def forget(self) -> None:
        """Lets go of every buffer; the next call makes it again."""
        self._made.clear()

    def _make(self, inputs) -> torch.Tensor:
        buffer = _empty_strided_cpu((self._numel,), (1,), self._dtype)
        self._fill(buffer, *inputs)
        return buffer


class Kernel:
    """One region with the machine code that replaces it."""

    def __init__(
        self, region: dict[str, Any], plan: dict[str, Any], library: ctypes.CDLL, key: str = "", alignment: int = 1,
        threads: int | None = None,
    ):
        self.region = region
        self.id: str = region["id"]
        self.key = key
        self._most_threads = threads
        self._inputs = [_dims(item["meta"]) for item in region["inputs"]]
        self._outputs = [_dims(meta) for meta in output_metas(region)]
        self._original = to_graph_module(region).forward
        #: Inputs that a prepare step reads: worth it only where they are parameters or buffers.
        self.constant_inputs = frozenset(which for step in plan.get("prepare", []) for which in step["inputs"])
        self._library = library
        self._warned = False
        self._prepared: list[Prepared] = []
        for step in plan.get("prepare", []):
            self._prepared.append(self._preparation(step, plan["prepare"]))
        #: The direct callable: tensors in, a tensor (or a tuple of them) out.
        self.call: Callable[..., Any] = self._specialise(plan, alignment)
        self._implementation = self._specialise(plan, alignment, operator=True)

    def _threads(self) -> Callable[[], int]:
        """What a kernel is given as its thread count: PyTorch's at each call, and never more than it was
        planned for, since its scratch memory may be sized by that."""
        most = self._most_threads
        if most is None:
            return torch.get_num_threads
        return lambda: min(torch.get_num_threads(), most)

    @property
    def prepared_bytes(self) -> int:
        """Memory beside the model's own: what was made from constant inputs and is kept."""
        return sum(buffer.bytes for buffer in self._prepared)

    def original(self, *inputs: torch.Tensor) -> Any:
        """The region's own operators, differentiable like any others."""
        results = self._original(*inputs)
        return results[0] if len(results) == 1 else tuple(results)

    def _mismatch(self, *inputs: torch.Tensor) -> Any:
        if not self._warned:
            self._warned = True
            found = ", ".join(f"{item.dtype} {list(item.shape)} strides {list(item.stride())}" for item in inputs)
            warnings.warn(f"autokernel: region {self.id} was built for other sizes, strides, types or alignment than those of ({found}); the original operators run", stacklevel=3)
        return self.original(*inputs)

    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The Python functions that call the machine code."""
        return self.call, self._implementation

    def plain(self, *inputs: torch.Tensor) -> Any:
        """The region's own operators with results that share no memory with the inputs, as an operator's must."""
        return _detached(self.original(*inputs), inputs)

    def _operator_mismatch(self, *inputs: torch.Tensor) -> Any:
        return _detached(self._mismatch(*inputs), inputs)

    def _operator_original(self, *inputs: torch.Tensor) -> Any:
        return _detached(self.original(*inputs), inputs)

    def _entry(self, name: str, arity: int):
        try:
            function = self._library[name]
        except AttributeError:
            raise Unsuitable(f"the artefact of region {self.id} has no entry `{name}`") from None
        # void* for numbers too: same registers, and half the conversion cost of int64.
        function.argtypes = [ctypes.c_void_p] * arity
        function.restype = None
        return function

    def _specialise(self, plan: dict[str, Any], alignment: int, operator: bool = False) -> Callable[..., Any]:
        """Writes the call as straight-line Python for this arity; a loop would cost more than the call itself.

        The body of an operator stands below autograd, and must not return what it was given.
        """
        names = [f"i{index}" for index in range(len(self._inputs))]
        scope: dict[str, Any] = {
            "check": assert_size_stride,
            "empty": _empty_strided_cpu,
            "threads": self._threads(),
            "grad_enabled": torch.is_grad_enabled,
            "original": self.original,
            "mismatch": self._operator_mismatch if operator else self._mismatch,
            "unprepared": self._operator_original if operator else self.original,
        }
        arguments = ", ".join(names)
        body: list[str] = []
        floats = [name for name, (_, _, dtype) in zip(names, self._inputs) if dtype.is_floating_point]
        if floats and not operator:
            body += [f"if grad_enabled() and ({' or '.join(f'{name}.requires_grad' for name in floats)}):", f"    return original({arguments})"]
        if names:
            body.append("try:")
            for index, (name, dims) in enumerate(zip(names, self._inputs)):
                scope[f"size{index}"], scope[f"stride{index}"], scope[f"dtype{index}"] = dims
                body.append(f"    check({name}, size{index}, stride{index})")
            body += ["except AssertionError:", f"    return mismatch({arguments})"]
            body += [f"if {' or '.join(f'{name}.dtype is not dtype{index}' for index, name in enumerate(names))}:", f"    return mismatch({arguments})"]
        body += [f"p{name} = {name}.data_ptr()" for name in names]
        aligned = [f"p{name}" for name, (_, _, dtype) in zip(names, self._inputs) if alignment > dtype.itemsize]
        if aligned:
            body += [f"if ({' | '.join(aligned)}) & {alignment - 1}:", f"    return mismatch({arguments})"]
        body += self._preparations(plan, scope)
        body += self._allocations(plan, scope)
        for index, launch in enumerate(plan["launches"]):
            scope[f"entry{index}"] = self._entry(launch["entry"], len(launch["args"]))
            body.append(f"entry{index}({', '.join(_argument(arg) for arg in launch['args'])})")
        results = [f"o{index}" for index in range(len(self._outputs))]
        body.append(f"return {results[0] if len(results) == 1 else '(' + ', '.join(results) + ')'}")
        name = f"r_{self.id}"
        source = f"def {name}({arguments}):\n" + "".join(f"    {line}\n" for line in body)
        exec(compile(source, f"<autokernel {name}>", "exec"), scope)  # noqa: S102: text written above
        function = scope[name]
        function.__module__ = "autokernel_kernels"
        return function

    def _allocations(self, plan: dict[str, Any], scope: dict[str, Any]) -> list[str]:
        body = []
        for index, dims in enumerate(self._outputs):
            scope[f"osize{index}"], scope[f"ostride{index}"], scope[f"odtype{index}"] = dims
            body += [f"o{index} = empty(osize{index}, ostride{index}, odtype{index})", f"po{index} = o{index}.data_ptr()"]
        for index, buffer in enumerate(plan.get("scratch", [])):
            scope[f"ssize{index}"], scope[f"sdtype{index}"] = (buffer["numel"],), tensors.DTYPES[buffer["dtype"]]
            body += [f"s{index} = empty(ssize{index}, (1,), sdtype{index})"]
            if buffer.get("zero"):
                body.append(f"s{index}.zero_()")
            body.append(f"ps{index} = s{index}.data_ptr()")
        return body

    def _preparations(self, plan: dict[str, Any], scope: dict[str, Any]) -> list[str]:
        body = []
        arguments = ", ".join(f"i{index}" for index in range(len(self._inputs)))
        for index, step in enumerate(plan.get("prepare", [])):
            scope[f"prepared{index}"] = self._prepared[index]
            body += [
                f"b{index} = prepared{index}({', '.join(f'i{which}' for which in step['inputs'])})",
                f"if b{index} is None:",
                f"    return unprepared({arguments})",
                f"pp{index} = b{index}.data_ptr()",
            ]
        return body

    def _preparation(self, step: dict[str, Any], steps: list[dict[str, Any]]) -> Prepared:
        launch, index = step["launch"], len(self._prepared)
        names = [f"i{which}" for which in step["inputs"]]
        inner = {"entry": self._entry(launch["entry"], len(launch["args"])), "threads": self._threads()}
        lines = [f"p{name} = {name}.data_ptr()" for name in names] + [f"pp{index} = buffer.data_ptr()"]
        for earlier, prepared in enumerate(self._prepared):
            if {"prepared": earlier} in launch["args"]:
                inner[f"prepared{earlier}"] = prepared
                given = ", ".join(f"i{which}" for which in steps[earlier]["inputs"])
                lines += [f"b{earlier} = prepared{earlier}({given})", f"pp{earlier} = b{earlier}.data_ptr()"]
        lines.append(f"entry({', '.join(_argument(arg) for arg in launch['args'])})")
        source = f"def fill(buffer, {', '.join(names)}):\n" + "".join(f"    {line}\n" for line in lines)
        exec(compile(source, f"<autokernel prepare {self.id}>", "exec"), inner)  # noqa: S102: text written above
        return Prepared(inner["fill"], step["numel"], tensors.DTYPES[step["dtype"]])

    # --- operators ---------------------------------------------------------------------------

    def _fits(self, inputs) -> bool:
        for item, (size, stride, dtype) in zip(inputs, self._inputs):
            if item.dtype is not dtype or item.dim() != len(size) or item.device.type != "cpu":
                return False
            if any(type(n) is not int or n != wanted for n, wanted in zip(item.shape, size)):
                return False
            if any(n > 1 and (type(s) is not int or s != wanted) for n, s, wanted in zip(size, item.stride(), stride)):
                return False
        return True

    def _fake(self, *inputs: torch.Tensor) -> Any:
        if not self._fits(inputs):
            return _detached(self.original(*inputs), inputs)
        made = tuple(torch.empty_strided(size, stride, dtype=dtype, device="cpu") for size, stride, dtype in self._outputs)
        return made[0] if len(made) == 1 else made

    def _backward(self, context, *gradients):
        """Runs the original operators again under autograd; differentiable itself, for second derivatives."""
        wanted = [index for index, needed in enumerate(context.needs_input_grad) if needed]
        saved = context.saved_tensors
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [item.view_as(item) if create_graph else item.detach() for item in saved]
            for index in wanted:
                if not inputs[index].requires_grad:
                    inputs[index].requires_grad_()
            results = self.original(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            pairs = [(r, g) for r, g in zip(results, gradients) if g is not None and r.requires_grad]
            found: list = [None] * len(inputs)
            if pairs and wanted:
                grads = torch.autograd.grad(
                    [r for r, _ in pairs], [inputs[index] for index in wanted], [g for _, g in pairs],
                    allow_unused=True, create_graph=create_graph,
                )
                for index, grad in zip(wanted, grads):
                    found[index] = grad
        return tuple(found)

    def operator(self):
        """`torch.ops.autokernel.r_<region>`, registered once in a process."""
        return self._register("r", autograd=True)

    def inner_operator(self):
        """The operator for graphs below autograd."""
        return self._register("k", autograd=False)

    def _register(self, prefix: str, autograd: bool):
        registry = process_wide("operators")
        name = f"{prefix}_{self.id}"
        if registry.get(name, (self.key,))[0] != self.key:
            # Another package brought another kernel for the same region: both may live.
            name = f"{name}_{self.key[:8]}"
        if name not in registry:
            library = torch.library.Library("autokernel", "FRAGMENT")
            result = "Tensor" if len(self._outputs) == 1 else f"({', '.join(['Tensor'] * len(self._outputs))})"
            inputs = ", ".join(f"Tensor i{index}" for index in range(len(self._inputs)))
            tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
            library.define(f"{name}({inputs}) -> {result}", tags=tags)
            library.impl(name, self._implementation, "CPU")
            torch.library.register_fake(f"autokernel::{name}", self._fake, lib=library)
            if autograd:
                torch.library.register_autograd(f"autokernel::{name}", self._backward, setup_context=_save, lib=library)
            registry[name] = (self.key, library, self)
        return getattr(torch.ops.autokernel, name).default


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _detached(results, inputs):
    """Results that share memory with an input, copied."""
    many = isinstance(results, tuple)
    taken = [item.untyped_storage()._cdata for item in inputs]
    fresh = []
    for item in results if many else (results,):
        fresh.append(item.clone() if item.untyped_storage()._cdata in taken else item)
        taken.append(fresh[-1].untyped_storage()._cdata)
    return tuple(fresh) if many else fresh[0]


def _argument(arg: Any) -> str:
    if arg == "threads":
        return "threads()"
    if isinstance(arg, dict):
        ((kind, value),) = arg.items()
        if kind == "int":
            return str(int(value))
        if kind in ("input", "output", "scratch"):
            return f"p{kind[0]}{int(value)}"
        if kind == "prepared":
            return f"pp{int(value)}"
    raise Unsuitable(f"the plan holds an argument that this runtime does not know: {arg}")


def load_kernel(entry: dict[str, Any], folder: Path) -> Kernel:
    """The kernel of one entry of a package's manifest; raises `Unsuitable`."""
    guards = entry.get("guards") or {}
    lacking = sorted(set(guards.get("cpu_features") or ()) - cpu_features())
    if lacking:
        raise Unsuitable(f"this processor lacks {', '.join(lacking)}")
    library, key = load_artefact(folder / entry["artefact"], entry.get("artefact_sha256"))
    return Kernel(entry["region"], entry["plan"], library, key, int(guards.get("alignment") or 1), guards.get("threads"))

"""The zygote: imports torch, builds and compiles one subject, runs no kernel, and forks.

A child starts with everything compiled and with no thread but its own, so OpenMP makes its pool in
the child. Children of one zygote are fresh processes at the price of a fork.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

# numpy's own thread pool would start with the import, in a process that is to be forked.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import backend, confine, model, region as regions, tensors
from .kernels import Kernel, Unsuitable
from .package import open_package
from .wire import Connection, RequestError, Stop, serve

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def steady_allocator() -> None:
    """Puts glibc's allocator where a process that has lived for a while has it.

    By default large outputs are mapped, touched page by page and given back at each call, until a
    large enough block was freed once; which contestant has done so is chance, and what a page costs
    depends on the machine's other tenants (0.5 to 5 us were seen). Batches of several calls, which keep
    as many outputs alive and free them at once, meet it most. With it off, what is measured is the
    work; a model that wastes memory looks no worse than it is, so speedups err on the low side.
    Blocks above 32 MiB stay mapped, as they are for users. No effect where the C library has no such
    switch.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def no_monitor_thread() -> None:
    """Keeps tqdm, which compiling uses where a user has it, from starting a thread at its first bar."""
    try:
        from tqdm import tqdm
    except ImportError:
        return
    tqdm.monitor_interval = 0


def threads_alive() -> int:
    """Threads of this process, Python's and native ones."""
    return len(os.listdir("/proc/self/task"))


def empty_inputs(region: dict[str, Any]) -> list[torch.Tensor]:
    """Memory of the right sizes and strides; nothing is computed and nothing is in it."""
    metas = [item["meta"] for item in region["inputs"]]
    return [torch.empty_strided(meta["shape"], meta["stride"], dtype=tensors.DTYPES[meta["dtype"]]) for meta in metas]


def compile_region(region: dict[str, Any]) -> Callable[..., Any]:
    """The region under Inductor as it comes, at what it would cost inside a larger graph.

    That is Inductor's generated function without the wrappers that stand once around a whole graph:
    a baseline must not look slow for being small. Where the function doesn't take and give exactly
    what the region does, the wrapped one is used.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner: list[tuple[fx.GraphModule, Any]] = []

    def compile_inner(gm: fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        compiled = compile_fx_inner(gm, example_inputs, **options)
        inner.append((gm, compiled))
        return compiled

    gm = regions.to_graph_module(region)
    with torch.no_grad():
        wrapped = compile_fx(gm, empty_inputs(region), inner_compile=compile_inner)
    if len(inner) == 1:
        graph, compiled = inner[0]
        run = getattr(compiled, "current_callable", None)
        if run is not None and _same_signature(region, graph):
            names = ", ".join(f"i{index}" for index in range(len(region["inputs"])))
            return eval(f"lambda {names}: run([{names}])", {"run": run})  # noqa: S307: text written above
    return wrapped


def _same_signature(region: dict[str, Any], gm: fx.GraphModule) -> bool:
    inputs = [tensors.meta(node.meta["val"]) for node in gm.graph.find_nodes(op="placeholder")]
    (output,) = gm.graph.find_nodes(op="output")
    results = output.args[0]
    metas = [item["meta"] for item in region["inputs"]]
    fresh = all(isinstance(item, fx.Node) and item.op == "call_function" for item in results)
    return inputs == metas and fresh and len(set(results)) == len(results) == len(region["outputs"])


class Subject:
    """What is measured: a callable, and where its arguments come from."""

    def __init__(
        self, run: Callable[..., Any], draw: Callable[[int], Any] | None = None, report: Callable[[], Any] | None = None,
        kernels: list[Kernel] | None = None,
    ):
        self.run, self.draw, self.report = run, draw, report
        #: The kernels in it that nobody trusts; `None` where there are none.
        self.kernels = kernels


def _region_subject(subject: dict[str, Any]) -> Subject:
    region, how = subject["region"], subject["how"]
    if how == "eager":
        return Subject(regions.to_graph_module(region).forward)
    if how == "inductor":
        return Subject(compile_region(region))
    if how == "package":
        try:
            kernel = open_package(subject["package"]).kernel(region["id"])
            return Subject(kernel.call, kernels=[kernel])
        except Unsuitable as error:
            raise RequestError("unsuitable", str(error)) from None
    raise RequestError("protocol", f"a region can't be run as {how!r}")


def _model_subject(subject: dict[str, Any], threads: int) -> Subject:
    loaded = model.load(subject["model"], subject.get("inputs") or (), subject.get("seed", 0))
    # Copied while there is one thread: copying a large tensor under more would start their pool here.
    args, kwargs = loaded.fresh_inputs()
    form, kernels = subject["form"], None
    if form == "eager":
        return Subject(loaded.module, loaded.draw)
    if form == "compile":
        compiled = backend.compile_model(loaded.module, backend.stock_inductor())
    elif form in ("ours+eager", "ours+inductor"):
        package = open_package(subject["package"])
        compiled = package.load(loaded.module, form=form)
        kernels = package.kernels[0]
    else:
        raise RequestError("protocol", f"a model can't be run as {form!r}")
    # Dynamo guards on the thread count: compiling under another one would mean compiling again in
    # every child. Setting it starts no thread.
    torch.set_num_threads(threads)
    if compiled is not loaded.module and subject.get("ahead", True):
        backend.compile_ahead(compiled, args, kwargs)
    return Subject(compiled, loaded.draw, getattr(compiled, "autokernel_report", None), kernels)


class Zygote:
    """The handlers of the role."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.subject: Subject | None = None
        self.threads = 1

    def handlers(self) -> dict[str, Any]:
        return {"prepare": self.prepare, "fork": self.fork, "quit": _quit}

    def prepare(self, body: dict[str, Any], _descriptors: list[int]) -> dict[str, Any]:
        subject = body["subject"]
        self.threads = int(body.get("threads") or subject.get("threads") or 1)
        # The compiler's children must be waited for; see fork.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        backend.codegen_threads(self.threads)
        torch.set_num_threads(1)
        no_monitor_thread()
        started = time.perf_counter()
        if subject["kind"] == "region":
            self.subject = _region_subject(subject)
        elif subject["kind"] == "model":
            self.subject = _model_subject(subject, self.threads)
        else:
            raise RequestError("protocol", f"unknown kind of subject: {subject['kind']!r}")
        seconds = time.perf_counter() - started
        if (alive := threads_alive()) > 1:
            # OpenMP does not survive a fork beside its pool: a child would wait for threads that are not there.
            self.subject = None
            raise RequestError("threads_alive", f"compiling left {alive} threads; a child of this process would hang")
        reply = {"ready": True, "compile_seconds": seconds, "threads_alive": threads_alive()}
        if self.subject.report is not None:
            report = self.subject.report()
            reply["matched"], reply["places"] = report.matched, dict(report.places)
        # What is here now stays: a collection in a child would only copy its pages.
        gc.collect()
        gc.freeze()
        return reply

    def fork(self, _body: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        if self.subject is None:
            raise RequestError("protocol", "fork before prepare")
        if len(descriptors) != 1:
            raise RequestError("protocol", f"fork needs one descriptor, {len(descriptors)} came")
        # Nobody here waits for the children; the kernel buries them.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(self, parent, descriptors[0])
        os.close(descriptors[0])
        try:
            os.setpgid(pid, pid)  # The child does the same; whoever comes first.
        except OSError:
            pass
        return {"pid": pid}


def _quit(_body: dict[str, Any], _descriptors: list[int]) -> dict[str, Any]:
    raise Stop({})


def _child(zygote: Zygote, parent: int, fd: int) -> None:
    """The life of a child; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            os.setpgid(0, 0)
        except OSError:
            pass
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        zygote.connection.close()
        steady_allocator()
        torch.set_num_threads(zygote.threads)
        torch.set_grad_enabled(False)
        serve(Connection.from_fd(fd), confine.gate(zygote.subject, Child(zygote.subject).handlers()))
        status = 0
    except BaseException:  # noqa: BLE001: nothing may climb into the zygote's own loop
        traceback.print_exc()
    finally:
        os._exit(status)


class Child:
    """Runs staged calls and says where their results lie.

    A call's arguments are a *slot*: for a region, inputs of its own beside the constant inputs of its
    group; for a whole model, a draw of its own. Slots stay where they are, and `refresh` gives them new
    content outside of the clock, so that what a call computes was never seen by this process before.
    """

    def __init__(self, subject: Subject):
        self.subject = subject
        self.staged: list[tuple[tuple, dict]] = []
        self.results: list[Any] = []
        self._words: dict[Any, dict[str, Any]] = {}
        self._constants: list[dict[int, torch.Tensor]] = []
        self._fixed = False
        self._wake = torch.zeros(1 << 18)
        # Forked children would share one address layout, and with it its luck; shift each a little.
        self._padding = [torch.empty(4096 * (1 + byte)) for byte in os.urandom(2)]

    def handlers(self) -> dict[str, Any]:
        return {
            "stage": self.stage, "refresh": self.refresh, "batch": self.batch, "outputs": self.outputs,
            "release": self.release, "quit": _quit,
        }

    def stage(self, body: dict[str, Any], _descriptors: list[int]) -> dict[str, Any]:
        """Makes slots: draws of the model under `draws`, or empty inputs of a region, as many as `slots` says in all."""
        self.results = []
        reply = self._stage_draws(body["draws"]) if "draws" in body else self._stage_inputs(body)
        gc.collect()
        gc.freeze()
        gc.disable()
        return {"staged": len(self.staged), **reply}

    def _stage_draws(self, seeds: list[int]) -> dict[str, Any]:
        started = time.perf_counter()
        self.staged = [self._draw(seed) for seed in seeds]
        seconds = (time.perf_counter() - started) / max(len(seeds), 1)
        if len(self.staged) > 1:
            # Factories with inputs of their own give the same ones under every seed.
            first, second = (pytree.tree_leaves(slot) for slot in self.staged[:2])
            self._fixed = len(first) == len(second) and all(map(_equal, first, second))
        size = max((sum(map(_size, pytree.tree_leaves(slot))) for slot in self.staged), default=0)
        return {"bytes": size, "seconds": seconds, "fixed": self._fixed}

    def _stage_inputs(self, body: dict[str, Any]) -> dict[str, Any]:
        inputs, groups = body["inputs"], body["groups"]
        if not self._constants:
            constant = [place for place, item in enumerate(inputs) if item["constant"]]
            self._constants = [{place: _empty(inputs[place]["meta"]) for place in constant} for _ in range(groups)]
        for slot in range(len(self.staged), body["slots"]):
            shared = self._constants[slot % groups]
            args = (shared[place] if place in shared else _empty(item["meta"]) for place, item in enumerate(inputs))
            self.staged.append((tuple(args), {}))
        return {}

    def refresh(self, body: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """New content for these slots: from a memory file that comes with the request, or drawn anew.

        The file is open only in here, and no kernel runs before it is closed. Whoever looks at version
        counters sees that the tensors were written to.
        """
        if "seeds" in body:
            for slot, seed, plain in zip(body["slots"], body["seeds"], body["plain"], strict=True):
                drawn = self._draw(seed)
                if self._fixed and not plain:
                    drawn = _edited(drawn, seed)
                self.staged[slot] = _moved_into(self.staged[slot], drawn)
        else:
            (content,) = descriptors
            try:
                self._copy(content, body)
            finally:
                os.close(content)
        # Threads that slept meanwhile are woken by work of ours: a call of the kernel here could look
        # at what it is to be timed on.
        for _ in range(4):
            self._wake.add_(1)
        return {"refreshed": len(body["slots"])}

    def _copy(self, content: int, body: dict[str, Any]) -> None:
        for group, offsets in zip(self._constants, body.get("constants") or (), strict=False):
            for place, offset in zip(sorted(group), offsets, strict=True):
                _fill(group[place], content, offset)
        for slot, offsets in zip(body["slots"], body["offsets"], strict=True):
            shared = self._constants[slot % len(self._constants)]
            own = [item for place, item in enumerate(self.staged[slot][0]) if place not in shared]
            for item, offset in zip(own, offsets, strict=True):
                _fill(item, content, offset)

    def _draw(self, seed: int) -> tuple[tuple, dict]:
        if self.subject.draw is None:
            raise RequestError("protocol", "a region has no draws of its own")
        args, kwargs = model.copy_inputs(self.subject.draw(seed))
        return tuple(args), kwargs

    def batch(self, body: dict[str, Any], _descriptors: list[int]) -> dict[str, Any]:
        """Runs the calls back to back. With `addresses: false` the reply says only that they are done; see `outputs`."""
        run = self.subject.run
        calls = [self.staged[index] for index in body["calls"]]
        self.results = results = []
        keep = results.append
        for args, kwargs in calls:
            keep(run(*args, **kwargs))
        if body.get("addresses", True):
            return self.outputs(body, _descriptors)
        return {"done": len(results)}

    def outputs(self, _body: dict[str, Any], _descriptors: list[int]) -> dict[str, Any]:
        return {"outputs": [[self._describe(item) for item in model.flatten(result)] for result in self.results]}

    def release(self, _body: dict[str, Any], _descriptors: list[int]) -> dict[str, Any]:
        """Frees the last batch's results outside of the next one's time."""
        self.results = []
        return {}

    def _describe(self, item: torch.Tensor) -> dict[str, Any]:
        key = (item.dtype, item.shape, item.stride())
        words = self._words.get(key)
        if words is None:
            described = tensors.meta(item)
            if described is None or item.device.type != "cpu":
                raise RequestError("unsupported_output", f"a result is {item.dtype}, {item.layout}, on {item.device}")
            words = {"bytes": tensors.extent(described["shape"], described["stride"]) * item.element_size(), **described}
            self._words[key] = words
        return {"address": item.data_ptr(), **words}


def _empty(meta: dict[str, Any]) -> torch.Tensor:
    """A tensor that has what it needs and nothing more: the storage that its strides reach."""
    storage = torch.empty(tensors.extent(meta["shape"], meta["stride"]), dtype=tensors.DTYPES[meta["dtype"]])
    return storage.as_strided(meta["shape"], meta["stride"])


def _fill(tensor: torch.Tensor, content: int, offset: int) -> None:
    """Overwrites the storage of a tensor of `_empty` with bytes of the file."""
    count = tensors.extent(tensor.shape, tensor.stride())
    if count == 0:
        return
    memory = memoryview(tensor.as_strided((count,), (1,)).view(torch.uint8).numpy())
    os.lseek(content, offset, os.SEEK_SET)
    while len(memory):
        copied = os.readv(content, [memory])
        if copied == 0:
            raise RequestError("protocol", "the content ends before the inputs do")
        memory = memory[copied:]
    torch.autograd.graph.increment_version(tensor)


def _size(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other)


def _moved_into(old: tuple[tuple, dict], new: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """`new` in the memory of `old`, tensor by tensor where they are alike."""
    before, _ = pytree.tree_flatten(old)
    after, structure = pytree.tree_flatten(new)
    if len(before) != len(after):
        return new

    def alike(one: Any, other: Any) -> bool:
        return (
            type(one) is type(other) is torch.Tensor and not other.requires_grad and one.layout == other.layout == torch.strided
            and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()) and 0 not in one.stride()
        )

    kept = [one.copy_(other) if alike(one, other) else other for one, other in zip(before, after)]
    return pytree.tree_unflatten(kept, structure)


def _edited(drawn: tuple[tuple, dict], seed: int) -> tuple[tuple, dict]:
    """Inputs that are the same under every seed, made new as the parent does it with those of regions.

    Every number becomes a little smaller, by another factor each. Where there are only whole numbers,
    which mean something else than their size, they change places.
    """
    generator = torch.Generator().manual_seed(seed)
    leaves, structure = pytree.tree_flatten(drawn)
    editable = [isinstance(leaf, torch.Tensor) and not leaf.requires_grad and leaf.numel() > 1 for leaf in leaves]
    numbers = [able and leaf.is_floating_point() for able, leaf in zip(editable, leaves)]
    for place, leaf in enumerate(leaves):
        if numbers[place]:
            factor = 1 - torch.rand(leaf.shape, generator=generator, dtype=torch.float64) / 16
            leaves[place] = (leaf * factor).to(leaf.dtype)
        elif editable[place] and not any(numbers):
            leaves[place] = leaf.roll(int(torch.randint(1, leaf.numel(), (), generator=generator)))
    return pytree.tree_unflatten(leaves, structure)


def main(connection: Connection | None = None) -> None:
    """Serves the role until the parent is gone."""
    connection = connection or Connection.from_environment()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    serve(connection, Zygote(connection).handlers())
    # Nothing is worth taking down in order; some libraries complain at length when it happens.
    sys.stderr.flush()
    os._exit(0)

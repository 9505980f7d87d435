"""Regions, kernels and packages made by hand, for the tests of the package and the zygote."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import fx, nn

from autokernel import graph, package, region as regions, tensors

ROWS, WIDTH = 48, 96
EPS = 1e-6

SOURCE = r"""
#include <cstdint>
#include <cmath>
extern "C" void rms_norm(const float *x, const float *w, float *out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < rows; ++r) {
        double sum = 0;
        for (int64_t c = 0; c < width; ++c) sum += double(x[r * width + c]) * x[r * width + c];
        float scale = float(1 / std::sqrt(sum / width + 1e-6));
        for (int64_t c = 0; c < width; ++c) out[r * width + c] = x[r * width + c] * scale * w[c];
    }
}
extern "C" void sum_and_gate(const float *a, const float *b, float *sum, float *gate, float *work, int64_t n, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < n; ++i) {
        work[i] = a[i] + b[i];
        sum[i] = work[i];
        gate[i] = work[i] * (1 / (1 + std::exp(-work[i])));
    }
}
extern "C" void double_weight(const float *w, float *out, int64_t n) { for (int64_t i = 0; i < n; ++i) out[i] = 2 * w[i]; }
extern "C" void scaled(const float *x, const float *doubled, float *out, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows * width; ++i) out[i] = x[i] * doubled[i % width];
}
extern "C" void transpose(const float *w, float *out, int64_t columns, int64_t depth) {
    for (int64_t j = 0; j < columns; ++j) for (int64_t k = 0; k < depth; ++k) out[k * columns + j] = w[j * depth + k];
}
extern "C" void product(const float *x, const float *right, const float *bias, float *out, int64_t rows, int64_t depth, int64_t columns, int64_t relu) {
    for (int64_t i = 0; i < rows; ++i) for (int64_t j = 0; j < columns; ++j) {
        float sum = bias[j];
        for (int64_t k = 0; k < depth; ++k) sum += x[i * depth + k] * right[k * columns + j];
        out[i * columns + j] = relu && sum < 0 ? 0 : sum;
    }
}
"""


def make_region(function, example, constant=()) -> dict:
    """The region that `function`, written in `torch.ops.aten`, is on these inputs."""
    from torch.export.exported_program import _override_composite_implicit_decomp
    from torch.fx.experimental.proxy_tensor import make_fx

    # As in a capture without gradients, linear stays one operator.
    whole = {torch.ops.aten.linear.default: lambda *_, **__: NotImplemented}
    with _override_composite_implicit_decomp(whole), torch._C._AutoDispatchBelowAutograd():
        gm = make_fx(function)(*example)
    numbers: dict[fx.Node, dict] = {}
    inputs, nodes, results = [], [], []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            numbers[node] = {"input": len(inputs)}
            inputs.append({"meta": tensors.meta(node.meta["val"]), "constant": len(inputs) in constant})
        elif node.op == "call_function":
            args = [graph.encode(arg, numbers.__getitem__) for arg in node.args]
            kwargs = [[key, graph.encode(arg, numbers.__getitem__)] for key, arg in node.kwargs.items()]
            numbers[node] = {"node": len(nodes)}
            nodes.append({"op": regions.operator_name(node.target), "args": args, "kwargs": kwargs, "value": graph.value_of(node)})
        else:
            found = node.args[0]
            found = found if isinstance(found, (list, tuple)) else [found]
            results = [numbers[item]["node"] for item in found]
    text = json.dumps([inputs, nodes, results])
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    return {"schema": "autokernel.region/1", "id": name, "inputs": inputs, "nodes": nodes, "outputs": results}


def rms_norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def sum_and_gate(a, b):
    total = a + b
    return total, total * torch.sigmoid(total)


def doubled(x, w):
    return x * (w * 2)


def linear_relu(x, w, bias):
    return torch.relu(nn.functional.linear(x, w, bias))


@functools.cache
def linear_region(relu: bool) -> dict:
    example = [torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)]
    return make_region(linear_relu if relu else nn.functional.linear, example, constant=(1, 2))


@functools.cache
def rms_region() -> dict:
    return make_region(rms_norm, [torch.randn(ROWS, WIDTH), torch.randn(WIDTH)], constant=(1,))


@functools.cache
def gate_region() -> dict:
    return make_region(sum_and_gate, [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)])


@functools.cache
def doubled_region() -> dict:
    return make_region(doubled, [torch.randn(ROWS, WIDTH), torch.randn(WIDTH)], constant=(1,))


def doubled_plan() -> dict:
    """With a prepare step over the constant input."""
    step = {"name": "twice", "dtype": "f32", "numel": WIDTH, "inputs": [1],
            "launch": launch("double_weight", [{"input": 1}, {"prepared": 0}, {"int": WIDTH}])}
    args = [{"input": 0}, {"prepared": 0}, {"output": 0}, {"int": ROWS}, {"int": WIDTH}]
    return {"scratch": [], "prepare": [step], "launches": [launch("scaled", args)]}


def launch(entry: str, args: list) -> dict:
    return {"entry": entry, "grid": [1, 1, 1], "block": [1, 1, 1], "shared": 0, "cluster": None, "cooperative": False, "args": args}


def linear_plan(relu: bool) -> dict:
    """Twice transposed is as it was, and once more is what the kernel reads: steps that read what others made."""
    def step(source):
        args = [source, {"prepared": len(steps)}, {"int": WIDTH}, {"int": WIDTH}]
        return {"name": f"t{len(steps)}", "dtype": "f32", "numel": WIDTH * WIDTH, "inputs": [1], "launch": launch("transpose", args)}

    steps: list[dict] = []
    for source in ({"input": 1}, {"prepared": 0}, {"prepared": 1}):
        steps.append(step(source))
    sizes = [{"int": ROWS}, {"int": WIDTH}, {"int": WIDTH}, {"int": int(relu)}]
    args = [{"input": 0}, {"prepared": 2}, {"input": 2}, {"output": 0}, *sizes]
    return {"scratch": [], "prepare": steps, "launches": [launch("product", args)]}


def rms_plan() -> dict:
    args = [{"input": 0}, {"input": 1}, {"output": 0}, {"int": ROWS}, {"int": WIDTH}, "threads"]
    return {"scratch": [], "launches": [launch("rms_norm", args)]}


def gate_plan() -> dict:
    args = [{"input": 0}, {"input": 1}, {"output": 0}, {"output": 1}, {"scratch": 0}, {"int": ROWS * WIDTH}, "threads"]
    work = {"name": "work", "dtype": "f32", "numel": ROWS * WIDTH, "zero": True}
    return {"scratch": [work], "launches": [launch("sum_and_gate", args)]}


@functools.cache
def artefact() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="autokernel-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = folder / "kernel.cpp"
    source.write_text(SOURCE)
    flags = ["-O2", "-fopenmp", "-fPIC", "-shared", "-nostartfiles", "-nodefaultlibs", "-fno-exceptions"]
    subprocess.run(["c++", *flags, str(source), "-o", str(folder / "kernel.so")], check=True)
    return folder / "kernel.so"


def make_package(folder: Path, form: str, entries=None) -> Path:
    """A package with the two regions, laid out as the engine lays it out."""
    if entries is None:
        entries = [(rms_region(), rms_plan()), (gate_region(), gate_plan())]
    bridge = Path(package.__file__).parent
    (folder / "_runtime").mkdir(parents=True)
    (folder / "artefacts").mkdir()
    for source in bridge.glob("*.py"):
        shutil.copy(source, folder / "_runtime" / source.name)
    shutil.copy(bridge / "package_init.py", folder / "__init__.py")
    listed = []
    for region, plan in entries:
        name = f"artefacts/{region['id']}.so"
        shutil.copy(artefact(), folder / name)
        guards = {"cpu_features": [], "alignment": 1}
        listed.append({"region": region, "file": f"kernels/{region['id']}.cpp", "artefact": name, "params": {}, "plan": plan, "guards": guards})
    manifest = {"schema": "autokernel.package/1", "form": form, "torch": torch.__version__, "regions": listed}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def edit_manifest(folder: Path, change) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


class Products(nn.Module):
    """The same product alone and with something behind it."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.first(x)) * torch.tanh(self.second(x))


class Model(nn.Module):
    """Both norms are the region; the gate's two results are used in two places; the rest is other work."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.first = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.second = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(rms_norm(x, self.first))
        total, gate = sum_and_gate(x, y)
        return torch.tanh(rms_norm(gate, self.second)) + 0.5 * total

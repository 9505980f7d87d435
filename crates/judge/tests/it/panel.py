"""Regions of many kinds with their input sets, and the outputs of kernels that are right but compute otherwise.

Called with a folder, a seed and (optionally) names: writes what the oracle would answer for each region, and for each set
the outputs of each honest form, as ``panel.json``. The forms are those of judges' experience: other orders of summation,
Welford, one chain and pairs, fused and unfused, exponentials off by a step or two, all in fp64 and rounded once.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(ROOT / "python" / "tests"))

import support  # noqa: E402
import torch  # noqa: E402

from autokernel import inputs, tensors  # noqa: E402
from autokernel import region as regions  # noqa: E402
from autokernel.oracle import Oracle  # noqa: E402

F = "import torch, torch.nn.functional as F\ndef build():\n    def f({args}):\n        {body}\n    return f, [{inputs}]\n"


# ---- arithmetic that is honest and not PyTorch's


def chain(x, dim=-1):
    """One chain of additions in the values' type."""
    total = torch.zeros_like(x.select(dim, 0))
    for i in range(x.shape[dim]):
        total = total + x.select(dim, i)
    return total.unsqueeze(dim)


def pairs(x, dim=-1):
    """Neighbours first."""
    x = x.movedim(dim, -1)
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.cat([x, torch.zeros_like(x[..., :1])], -1)
        x = x[..., 0::2] + x[..., 1::2]
    return x.movedim(-1, dim)


def lanes(x, dim=-1, width=16):
    """As vectors add: one chain a lane, lanes last."""
    x = x.movedim(dim, -1)
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % width)).unflatten(-1, (-1, width))
    return chain(chain(x, -2).squeeze(-2)).movedim(-1, dim)


def backwards(x, dim=-1):
    return lanes(x.flip(dim), dim, 8)


SUMS = {"lanes": lanes, "pairs": pairs, "backwards": backwards, "chain": chain}


def steps(t, seed):
    """A result that is off by up to two steps of its type here and there."""
    off = torch.randint(-1, 2, t.shape, generator=torch.Generator().manual_seed(seed))
    off = torch.where(torch.isfinite(t), off, 0)
    for _ in range(2):
        t = torch.where(off == 0, t, torch.nextafter(t, torch.where(off > 0, math.inf, -math.inf).to(t.dtype)))
    return t


def exp(x):
    return steps(torch.exp(x), 1)


def welford(x):
    mean, m2 = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
    for i in range(x.shape[-1]):
        v = x[..., i : i + 1]
        delta = v - mean
        mean = mean + delta / (i + 1)
        m2 = m2 + delta * (v - mean)
    return mean, m2


def moments(x, total):
    n = x.shape[-1]
    mean = total(x) / n
    return mean, total((x - mean).square())


def split_moments(x):
    """Two halves, merged (Chan)."""
    a, b = x.tensor_split(2, -1)
    (ma, sa), (mb, sb), n, k = moments(a, lanes), moments(b, lanes), a.shape[-1], b.shape[-1]
    delta = mb - ma
    return ma + delta * (k / (n + k)), sa + sb + delta * delta * (n * k / (n + k))


def in_f32(form):
    """Widened once, rounded once: how a fused kernel treats 16-bit types."""
    def run(*given):
        out = form(*(t.float() if t.is_floating_point() and t.dtype != torch.float64 else t for t in given))
        return out.to(given[0].dtype)
    return run


def variances(finish):
    yield "welford", lambda x, *r: finish(x, *welford(x), *r)
    yield "two halves", lambda x, *r: finish(x, *split_moments(x), *r)
    for name, total in SUMS.items():
        yield name, lambda x, *r, total=total: finish(x, *moments(x, total), *r)


def rms(eps, total, root=torch.rsqrt):
    return lambda x, w: x * root(total(x * x) / x.shape[-1] + eps) * w


def softmax(total, log=False, e=torch.exp):
    def run(x):
        m = x.amax(-1, keepdim=True)
        y = x - m
        s = total(e(y))
        return y - s.log() if log else e(y) * (1 / s)
    return run


def online(x):
    """Largest value and sum in one pass over tiles."""
    m, s = torch.full_like(x[..., :1], -math.inf), torch.zeros_like(x[..., :1])
    for tile in x.split(32, -1):
        new = torch.maximum(m, tile.amax(-1, keepdim=True))
        s = s * torch.exp(torch.where(m == new, 0.0, m - new)) + lanes(torch.exp(tile - new))
        m = new
    return torch.exp(x - m) / s


def gelu_tanh(x):
    u = 0.7978845608028654 * x * (1 + 0.044715 * x * x)
    # tanh through one exponential
    return x * (1 - 1 / (exp(2 * u) + 1))


PANEL = {
    "rms_norm": (
        F.format(args="x, w", body="return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w", inputs="torch.randn(64, 515), torch.randn(515)"),
        {
            **{n: rms(1e-6, t) for n, t in SUMS.items()},
            "sqrt and division": lambda x, w: x / torch.sqrt(lanes(x * x) / x.shape[-1] + 1e-6) * w,
            "weight first": lambda x, w: x * w * torch.rsqrt(lanes(x * x) / x.shape[-1] + 1e-6),
        },
    ),
    "layer_norm": (
        F.format(args="x, w, b", body="return F.layer_norm(x, (512,), w, b)", inputs="torch.randn(64, 512), torch.randn(512), torch.randn(512)"),
        dict(variances(lambda x, mean, m2, w, b: (x - mean) * torch.rsqrt(m2 / x.shape[-1] + 1e-5) * w + b)),
    ),
    "variance": (
        F.format(args="x", body="return x.var(-1, correction=1)", inputs="torch.randn(600, 256)"),
        dict(variances(lambda x, mean, m2: (m2 / (x.shape[-1] - 1)).squeeze(-1))),
    ),
    "softmax": (
        F.format(args="x", body="return F.softmax(x, -1)", inputs="torch.randn(64, 515)"),
        {**{n: softmax(t) for n, t in SUMS.items()}, "online": online, "exp off": softmax(lanes, e=exp)},
    ),
    "log_softmax": (
        F.format(args="x", body="return F.log_softmax(x, -1)", inputs="torch.randn(64, 515)"),
        {n: softmax(t, log=True) for n, t in SUMS.items()},
    ),
    "gelu_tanh": (F.format(args="x", body="return F.gelu(x, approximate='tanh')", inputs="torch.randn(64, 512)"), {"exp": gelu_tanh}),
    "gelu": (
        F.format(args="x", body="return F.gelu(x)", inputs="torch.randn(64, 512)"),
        {"erf": lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865476)), "halves": lambda x: x * (0.5 + 0.5 * torch.erf(x * 0.7071067811865476))},
    ),
    "swiglu": (
        F.format(args="x, y", body="return F.silu(x) * y", inputs="torch.randn(64, 512), torch.randn(64, 512)"),
        {"exp": lambda x, y: x / (1 + exp(-x)) * y, "product first": lambda x, y: x * y * torch.sigmoid(x)},
    ),
    "long_sum": (
        F.format(args="x", body="return x.sum(-1)", inputs="torch.randn(4, 100_000)"),
        {"lanes": lambda x: lanes(x, width=32).squeeze(-1), "pairs": lambda x: pairs(x).squeeze(-1)},
    ),
    "masked_softmax": (
        F.format(args="x, m", body="return F.softmax(x * 0.125 + m, -1)", inputs="torch.randn(64, 64), torch.full((64, 64), float('-inf')).triu(1)"),
        {n: lambda x, m, t=t: softmax(t)(x * 0.125 + m) for n, t in SUMS.items()},
    ),
    "log_and_root": (
        F.format(args="x, y", body="return torch.log(x + 1e-3) + torch.sqrt(y)", inputs="torch.rand(64, 512), torch.rand(64, 512)"),
        {"log2": lambda x, y: steps(torch.log2(x + 1e-3) * 0.6931471805599453, 2) + y.pow(0.5)},
    ),
    "rms_norm_bf16": (
        F.format(args="x, w", body="return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * w", inputs="torch.randn(64, 512).bfloat16(), torch.randn(512).bfloat16()"),
        {**{n: in_f32(rms(1e-6, t)) for n, t in SUMS.items()}, "as written": lambda x, w: rms(1e-6, lanes)(x.float(), 1.0).bfloat16() * w},
    ),
    "swiglu_bf16": (
        F.format(args="x, y", body="return F.silu(x) * y", inputs="torch.randn(64, 512).bfloat16(), torch.randn(64, 512).bfloat16()"),
        {"fused": in_f32(lambda x, y: x / (1 + exp(-x)) * y), "as written": lambda x, y: torch.nn.functional.silu(x) * y},
    ),
    "layer_norm_f16": (
        F.format(args="x, w, b", body="return F.layer_norm(x, (512,), w, b)", inputs="torch.randn(64, 512).half(), torch.randn(512).half(), torch.randn(512).half()"),
        {n: in_f32(f) for n, f in variances(lambda x, mean, m2, w, b: (x - mean) * torch.rsqrt(m2 / x.shape[-1] + 1e-5) * w + b)},
    ),
    "rms_norm_f64": (
        F.format(args="x, w", body="return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w", inputs="torch.randn(64, 512).double(), torch.randn(512).double()"),
        {n: rms(1e-6, t) for n, t in SUMS.items()},
    ),
    "softmax_f64": (
        F.format(args="x", body="return F.softmax(x, -1)", inputs="torch.randn(64, 512).double()"),
        {**{n: softmax(t) for n, t in SUMS.items()}, "exp off": softmax(lanes, e=exp)},
    ),
    "whole_numbers": (
        F.format(args="x, i", body="return (x > 0).to(torch.int32) + i, (i % 3 == 0) | (x < -1)", inputs="torch.randn(64, 512), torch.randint(0, 100, (64, 512), dtype=torch.int32)"),
        {"as written": lambda x, i: ((x > 0).to(torch.int32) + i, (i % 3 == 0) | (x < -1))},
    ),
}


def make(name, folder, seed):
    text, forms = PANEL[name]
    oracle = Oracle()
    oracle.load({"model": support.write_model(text), "inputs": [], "seed": seed % 1000})
    graph = oracle.capture({})["graphs"][0]
    region, occurrence = support.cut(graph, support.all_calls(graph))
    body = {"region": region, "occurrence": occurrence, "sets": 17, "seed": seed, "dir": str(folder / name)}
    reply = oracle.region_inputs(body)
    # Inputs of a region come in the order of their first use.
    order = [n["name"] for n in graph["nodes"] if n["name"] in occurrence["inputs"] and n["kind"] != "call"]
    honest = []
    for number, made in enumerate(reply["sets"]):
        given = dict(zip(occurrence["inputs"], (tensors.read(t) for t in made["inputs"])))
        given = [given[n] for n in order]
        for form, run in forms.items():
            with torch.no_grad():
                out = run(*given)
            out = list(out) if isinstance(out, tuple) else [out]
            stem = folder / name / f"honest-{number}-{form.replace(' ', '_')}"
            files = [tensors.write(t.contiguous(), Path(f"{stem}-{i}")) for i, t in enumerate(out)]
            honest.append({"form": form, "set": number, "outputs": files})
    return {"name": name, "region": region, "occurrence": occurrence, "reply": reply, "honest": honest}


if __name__ == "__main__":
    where, seed = Path(sys.argv[1]), int(sys.argv[2])
    made = [make(name, where, seed) for name in (sys.argv[3:] or PANEL)]
    (where / "panel.json").write_text(json.dumps(made))

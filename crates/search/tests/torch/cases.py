"""The cases of `tests/torch.rs`: every operator of the search agent's table, every overload, other than default arguments.

A case is a function of ATen calls on some inputs. Inputs of pointwise operators hold all special values of their
type; those of reductions have special rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

A = torch.ops.aten
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I64, I32, I8, U8, BOOL = torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool
FLOATS = (F32, F64, BF16, F16)
SHORT = {F32: "f32", F64: "f64", BF16: "bf16", F16: "f16", I64: "i64", I32: "i32", I8: "i8", U8: "u8", BOOL: "bool"}
INF, NAN = math.inf, math.nan


@dataclass
class Case:
    name: str
    function: Callable
    inputs: list[torch.Tensor]
    # Allowed error in ulp of f32 and f64, beyond one and a half times PyTorch's own.
    ulps: float = 4.0
    # Compare with the operator in its own types: where casts are the point.
    own: bool = False
    # Of the inputs in fp64: the size of terms that cancel.
    scale: Callable | None = None
    # Part of the reason why the table must refuse it.
    refused: str | None = None


def special(dtype: torch.dtype) -> list[float]:
    """Zeros, denormals, ends of the range, thresholds of activations and their neighbours."""
    info = torch.finfo(dtype)
    one = [0.0, 1.0, 0.5, 2.0, 3.0, 6.0, 20.0, 0.25, 4.0, 1 + info.eps, 1 - info.eps, 10.0, 88.0, 88.8, 104.0, 700.0, 1e4]
    ends = [info.max, info.max / 3, info.tiny, info.smallest_normal / 2, info.smallest_normal / info.max, math.sqrt(info.max)]
    signed = [*one, *ends, INF, info.eps, info.eps / 4, math.pi, 1e-3]
    return [sign * value for value in signed for sign in (1, -1)] + [NAN]


def wide(shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    """Special values first, then normal ones and ones of all magnitudes, shuffled by `seed`."""
    g = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == BOOL:
        return torch.rand(shape, generator=g) < 0.5
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        small = torch.randint(max(info.min, -50), 50, (count,), generator=g)
        ends = torch.tensor([info.min, info.max, info.max - 1, min(info.max, (1 << 24) + 1), min(info.max, (1 << 53) + 1)])
        values = torch.cat([ends, small])[:count]
        return values[torch.randperm(count, generator=g)].to(dtype).reshape(shape)
    values = torch.tensor(special(dtype), dtype=F64)
    normal = torch.randn(count, generator=g, dtype=F64) * torch.tensor([1.0, 5.0, 30.0]).repeat(count)[:count]
    reach = math.log2(torch.finfo(dtype).max) - 1
    spread = torch.exp2((torch.rand(count, generator=g, dtype=F64) * 2 - 1) * reach) * normal.sign()
    values = torch.cat([values, torch.stack([normal, normal, spread], 1).flatten()])[:count]
    return values[torch.randperm(count, generator=g)].to(dtype).reshape(shape)


def tame(shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed + 1000)
    if not dtype.is_floating_point:
        return wide(shape, dtype, seed)
    return torch.randn(shape, generator=g, dtype=F64).to(dtype)


def rows(shape: tuple[int, ...], dtype: torch.dtype = F32, huge: bool = True) -> torch.Tensor:
    """Normal rows after rows that are constant, far from zero, mixed in size, or hold something special.

    Without `huge` no sum of a row overflows: PyTorch's running mean survives that, our sum divided by a count does not.
    """
    x = tame((math.prod(shape[:-1]), shape[-1]), dtype, 5)
    x[0] = 0.75
    x[1] += 100
    x[2] *= torch.logspace(-3, 3, shape[-1]).to(dtype)
    x[3, 2] = NAN
    x[4, 1] = INF
    x[5, 3] = -INF
    x[6] = -INF
    x[7, 0], x[7, 1] = INF, -INF
    x[8] = torch.finfo(dtype).max / 2 if huge else 2.0 ** (math.frexp(torch.finfo(dtype).max)[1] // 2)
    x[9] = torch.finfo(dtype).smallest_normal / 4
    x[10] = 0.0
    x[11, :2] = torch.tensor([-0.0, 0.0])
    return x.reshape(shape)


def pointwise() -> Iterator[Case]:
    shape = (9, 61)
    names = "neg abs sqrt rsqrt reciprocal square relu hardswish hardsigmoid sign isnan exp expm1 log log1p log2 exp2 tanh " \
            "sigmoid silu gelu elu softplus mish sin cos erf leaky_relu hardtanh logical_not"
    # Terms that cancel, in PyTorch as well.
    scale = {"gelu": lambda x: x.abs(), "mish": lambda x: x.abs(), "silu": lambda x: 0 * x}
    for name in names.split():
        for dtype in FLOATS:
            yield Case(f"{name} {SHORT[dtype]}", getattr(A, name).default, [wide(shape, dtype)], scale=scale.get(name))
    other = {
        "gelu tanh": lambda x: A.gelu.default(x, approximate="tanh"),
        "elu 0.7 1.3 0.5": lambda x: A.elu.default(x, 0.7, 1.3, 0.5),
        "elu 2": lambda x: A.elu.default(x, 2),
        "softplus 2 5": lambda x: A.softplus.default(x, 2, 5),
        "softplus 0.3 1": lambda x: A.softplus.default(x, 0.3, 1.0),
        "leaky_relu 0.2": lambda x: A.leaky_relu.default(x, 0.2),
        "leaky_relu -1": lambda x: A.leaky_relu.default(x, -1),
        "leaky_relu 0": lambda x: A.leaky_relu.default(x, 0.0),
        "hardtanh -2 0.5": lambda x: A.hardtanh.default(x, -2.0, 0.5),
        "hardtanh 0 6": lambda x: A.hardtanh.default(x, 0, 6),
        "threshold": lambda x: A.threshold.default(x, 0.5, -3.0),
        "threshold 0 0": lambda x: A.threshold.default(x, 0, 0),
        "clamp low": lambda x: A.clamp.default(x, -1.5),
        "clamp high": lambda x: A.clamp.default(x, None, 2),
        "clamp both": lambda x: A.clamp.default(x, -0.3, 0.1),
        "clamp crossed": lambda x: A.clamp.default(x, 1.0, -1.0),
        "clamp keyword": lambda x: A.clamp.default(x, max=0.5),
        "clamp nan": lambda x: A.clamp.default(x, NAN),
        "clamp_min": lambda x: A.clamp_min.default(x, -0.0),
        "clamp_max": lambda x: A.clamp_max.default(x, 1),
        "masked_fill self": lambda x: A.masked_fill.Scalar(x, A.isnan.default(x), -2.5),
        "where scalars": lambda x: A.where.Scalar(A.gt.Scalar(x, 0), 1.5, -1.5),
        "where scalar other": lambda x: A.where.ScalarOther(A.le.Scalar(x, 0.1), x, -INF),
        "where scalar self": lambda x: A.where.ScalarSelf(A.lt.Scalar(x, 0.1), 0, x),
        "add scalar": lambda x: A.add.Tensor(x, 1.5),
        "add scalar alpha": lambda x: A.add.Scalar(x, 3, 2),
        "sub scalar": lambda x: A.sub.Tensor(x, 0.1),
        "rsub scalar": lambda x: A.rsub.Scalar(x, 1),
        "rsub scalar alpha": lambda x: A.rsub.Scalar(x, 1.5, 0.5),
        "mul scalar": lambda x: A.mul.Tensor(x, 3),
        "div scalar": lambda x: A.div.Tensor(x, 3.0),
        "div scalar tiny": lambda x: A.div.Scalar(x, 1e-3),
        "pow scalar base": lambda x: A.pow.Scalar(2.5, x),
        "pow scalar base 1": lambda x: A.pow.Scalar(1, x),
        "pow scalar base -2": lambda x: A.pow.Scalar(-2.0, x),
        "logical_not not": lambda x: A.logical_not.default(A.logical_not.default(x)),
    }
    for name, function in other.items():
        for dtype in (F32, BF16) if name == "where scalars" else (F32, BF16, F64):
            size = (lambda x: x.abs()) if "gelu" in name else (lambda x: x.abs() + 4) if name[:3] in ("add", "sub", "rsu") else None
            yield Case(f"{name} {SHORT[dtype]}", function, [wide(shape, dtype)], scale=size)
    for exponent in (0, 1, 2, 3, 4, 0.5, 1.5, -0.5, -1, -2, -3, -1.5, 2.5, 1 / 3, 0.1, INF, NAN, 200):
        for dtype in (F32, F64, BF16) if exponent in (0.5, 2, 3, -2) else (F32,):
            yield Case(f"pow {exponent:.3g} {SHORT[dtype]}", lambda x, e=exponent: A.pow.Tensor_Scalar(x, e), [wide(shape, dtype)])
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        for dtype in (F32, BF16, F16, F64):
            yield Case(f"{op} scalar {SHORT[dtype]}", lambda x, f=getattr(A, op).Scalar: f(x, 0.1), [A.masked_fill(wide(shape, dtype), wide(shape, BOOL), 0.1)])


def binary() -> Iterator[Case]:
    shape = (9, 61)
    functions = {
        "add": A.add.Tensor,
        "add alpha": lambda x, y: A.add.Tensor(x, y, alpha=0.3),
        "sub": A.sub.Tensor,
        "sub alpha": lambda x, y: A.sub.Tensor(x, y, alpha=-2),
        "rsub": A.rsub.Tensor,
        "rsub alpha": lambda x, y: A.rsub.Tensor(x, y, alpha=0.5),
        "mul": A.mul.Tensor,
        "div": A.div.Tensor,
        "maximum": A.maximum.default,
        "minimum": A.minimum.default,
        "pow": A.pow.Tensor_Tensor,
        "clamp tensors": lambda x, y: A.clamp.Tensor(x, y, A.abs.default(y)),
        "clamp_min tensor": A.clamp_min.Tensor,
        "clamp_max tensor": A.clamp_max.Tensor,
        "where": lambda x, y: A.where.self(A.lt.Tensor(x, y), x, y),
        **{op: getattr(A, op).Tensor for op in ("eq", "ne", "lt", "le", "gt", "ge")},
        **{op: getattr(A, op).default for op in ("logical_and", "logical_or", "logical_xor")},
    }
    size = {name: lambda x, y: x.abs() + 2 * y.abs() for name in functions if name[:3] in ("add", "sub", "rsu")}
    for number, (name, function) in enumerate(functions.items()):
        for at, dtype in enumerate(FLOATS):
            x, y = wide(shape, dtype, 1), wide(((61,), (9, 1), (9, 61), ())[(number + at) % 4], dtype, 2)
            yield Case(f"{name} {SHORT[dtype]}", function, [x, y], scale=size.get(name))
        yield Case(f"{name} both ways", function, [wide((7, 1, 19), F32, 3), wide((5, 1), F32, 4)], scale=size.get(name))
        if name not in ("eq", "ne", "lt", "le", "gt", "ge", "where", "pow"):
            yield Case(f"{name} bf16 f32", function, [wide(shape, BF16, 3), wide((61,), F32, 4)], scale=size.get(name))
    for op in ("eq", "lt", "where"):
        yield Case(f"{op} bf16 f32", functions[op], [tame(shape, BF16, 3), tame((61,), F32, 4)])
        yield Case(f"{op} bf16 f16", functions[op], [tame(shape, BF16, 3), tame((61,), F16, 4)])
        yield Case(f"{op} bf16 f32 scalar", functions[op], [torch.full(shape, 0.1, dtype=BF16), torch.tensor(0.1)], own=True)
    for op in ("logical_and", "logical_or", "logical_xor", "eq", "ne", "maximum", "minimum", "mul", "add", "bitwise_and", "bitwise_or"):
        overload = "Tensor" if op[:3] in ("eq", "ne", "mul", "add", "bit") else "default"
        function = getattr(getattr(A, op), overload)
        yield Case(f"{op} bool", function, [wide(shape, BOOL, 1), wide((61,), BOOL, 2)])
    yield Case("bitwise_not bool", A.bitwise_not.default, [wide(shape, BOOL)])
    yield Case("logical_not bool", A.logical_not.default, [wide(shape, BOOL)])
    yield Case("add bool then mul", lambda m, n, x: A.mul.Tensor(A.add.Tensor(m, n), x), [wide(shape, BOOL, 1), wide((61,), BOOL, 2), wide(shape)])
    yield Case("eq bools in floats", lambda m, x: A.mul.Tensor(x, A.eq.Tensor(m, A.gt.Scalar(x, 0))), [wide(shape, BOOL, 1), wide(shape)])
    masked = {
        "masked_fill": lambda x, m: A.masked_fill.Scalar(x, m, -INF),
        "masked_fill column": lambda x, m: A.masked_fill.Scalar(x, A.logical_not.default(m), 7),
        "masked_fill tensor": lambda x, m: A.masked_fill.Tensor(x, m, torch.ops.aten.scalar_tensor.default(0.5, dtype=x.dtype)),
        "where mask": lambda x, m: A.where.self(m, x, A.neg.default(x)),
        "where bools": lambda x, m: A.where.self(m, A.gt.Scalar(x, 0), A.isnan.default(x)),
        "mul mask": A.mul.Tensor,
        "sum mask": lambda x, m: A.mul.Tensor(x, A.sum.dim_IntList(m, [-1], True, dtype=torch.float32)),
    }
    for name, function in masked.items():
        for dtype, mask in ((F32, (9, 61)), (BF16, (9, 1)), (F64, (61,))):
            if name != "sum mask" or dtype == F32:
                yield Case(f"{name} {SHORT[dtype]}", function, [wide(shape, dtype), wide(mask, BOOL)])


def casts() -> Iterator[Case]:
    shape = (9, 61)
    for source in (F32, BF16, F16, I64, I32, U8, I8, BOOL):
        for target in (F32, BF16, F16):
            if source != target:
                yield Case(f"to {SHORT[source]} {SHORT[target]}", lambda x, t=target: A._to_copy.default(x, dtype=t), [wide(shape, source)], own=True)
        yield Case(f"to {SHORT[source]} bool", lambda x: A._to_copy.default(x, dtype=BOOL), [wide(shape, source)], own=True)
    yield Case("to i64 f64", lambda x: A._to_copy.default(x, dtype=F64), [wide(shape, I64)], own=True)
    yield Case("to f32 bf16 f32", lambda x: A._to_copy.default(A._to_copy.default(x, dtype=BF16), dtype=F32), [wide(shape)], own=True)
    yield Case("to f32 i64", lambda x: A._to_copy.default(x, dtype=I64), [tame(shape)], refused="i64")
    yield Case("to f32 f64", lambda x: A._to_copy.default(x, dtype=F64), [tame(shape)], refused="f64")
    integers = {
        "add": lambda n, x: A.add.Tensor(n, x),
        "mul": lambda n, x: A.mul.Tensor(x, n),
        "div": lambda n, x: A.div.Tensor(n, x),
        "maximum": lambda n, x: A.maximum.default(x, A._to_copy.default(n, dtype=x.dtype)),
        "where": lambda n, x: A.where.self(A.gt.Scalar(x, 0), x, A._to_copy.default(n, dtype=x.dtype)),
    }
    for name, function in integers.items():
        for dtype in (I64, I32, U8, I8):
            yield Case(f"{name} {SHORT[dtype]} f32", function, [wide((61,), dtype), tame(shape)], own=True, scale=lambda n, x: n.abs().double() + 0 * x)
    for name in ("sqrt", "sigmoid", "exp", "reciprocal", "isnan", "rsqrt", "log1p", "erf"):
        for dtype in (I64, BOOL, U8):
            yield Case(f"{name} {SHORT[dtype]}", getattr(A, name).default, [wide(shape, dtype)], own=True)
    yield Case("div i64 i64", A.div.Tensor, [wide(shape, I64), wide((61,), I64, 1)], own=True)
    yield Case("add i64 0.5", lambda n: A.add.Tensor(n, 0.5), [wide(shape, I64)], own=True)
    yield Case("pow i64 0.5", lambda n: A.pow.Tensor_Scalar(n, 0.5), [wide(shape, I64)], own=True)
    yield Case("add i64 i64", A.add.Tensor, [wide(shape, I64), wide(shape, I64, 1)], refused="i64")
    yield Case("gt i64", lambda n: A.gt.Scalar(n, 3), [wide(shape, I64)], refused="wide integers")
    yield Case("logical_not i64", A.logical_not.default, [wide(shape, I64)])
    yield Case("gt u8", lambda n: A.gt.Scalar(n, 3), [wide(shape, U8)])
    yield Case("lt u8 2.5", lambda n: A.lt.Scalar(n, 2.5), [wide(shape, U8)])
    yield Case("eq i8 u8", A.eq.Tensor, [wide(shape, I8), wide(shape, U8, 3)])
    fills = {
        "full": lambda x: A.mul.Tensor(x, A.full.default([61], 0.3)),
        "full int": lambda x: A.mul.Tensor(x, A.full.default([1], 3)),
        "full bool": lambda x: A.masked_fill.Scalar(x, A.full.default([61], True), 2),
        "full_like": lambda x: A.sub.Tensor(A.full_like.default(x, -2), x),
        "zeros_like": lambda x: A.maximum.default(A.zeros_like.default(x), x),
        "ones_like": lambda x: A.div.Tensor(A.ones_like.default(x), x),
        "scalar_tensor": lambda x: A.where.self(A.isnan.default(x), A.scalar_tensor.default(-INF), x),
        "eq full bf16": lambda x: A.eq.Tensor(A._to_copy.default(x, dtype=BF16), A.full.default([61], 0.1, dtype=BF16)),
    }
    for name, function in fills.items():
        yield Case(name, function, [A.masked_fill(wide(shape), wide(shape, BOOL), 0.1)], own=name == "eq full bf16")


def reductions() -> Iterator[Case]:
    functions = {
        "sum": lambda x: A.sum.dim_IntList(x, [-1]),
        "sum keep": lambda x: A.sum.dim_IntList(x, [1], True),
        "mean": lambda x: A.mean.dim(x, [-1]),
        "mean keep": lambda x: A.mean.dim(x, [-1], True),
        "amax": lambda x: A.amax.default(x, [-1]),
        "amin": lambda x: A.amin.default(x, [-1], True),
        "norm": lambda x: A.linalg_vector_norm.default(x, 2, [-1]),
        "norm default": lambda x: A.linalg_vector_norm.default(x, dim=[-1], keepdim=True),
        "norm 1": lambda x: A.linalg_vector_norm.default(x, 1, [-1]),
        "norm inf": lambda x: A.linalg_vector_norm.default(x, INF, [-1], True),
        "logsumexp": lambda x: A.logsumexp.default(x, [-1]),
        "var": lambda x: A.var.correction(x, [-1]),
        "var 0": lambda x: A.var.correction(x, [-1], correction=0, keepdim=True),
        "var 2.5": lambda x: A.var.correction(x, [-1], correction=2.5),
        "var 1000": lambda x: A.var.correction(x, [-1], correction=1000),
        "std": lambda x: A.std.correction(x, [-1], correction=0),
        "var_mean": lambda x: A.var_mean.correction(x, [-1], correction=0, keepdim=True),
        "var_mean default": lambda x: A.var_mean.correction(x, [-1]),
        "softmax": lambda x: A._softmax.default(x, -1, False),
        "log_softmax": lambda x: A._log_softmax.default(x, 1, False),
        "normalise": lambda x: A.native_layer_norm.default(x, [x.shape[-1]], None, None, 1e-5),
        "normalise eps 0": lambda x: A.native_layer_norm.default(x, [x.shape[-1]], None, None, 0.0)[0],
        "softmax of mask": lambda x: A._softmax.default(A.masked_fill.Scalar(x, A.isnan.default(x), -INF), -1, False),
    }

    def size(name: str) -> Callable | None:
        """Sums cancel; rows that are far from zero lose digits of their spread."""
        keep = "keep" in name or name.startswith(("softmax", "log_", "normalise"))
        if name.startswith(("sum", "mean")):
            return lambda x: 8 * x.abs().nan_to_num(0, 0, 0).sum(-1, keepdim=keep)
        if name.startswith("normalise"):
            return lambda x: 8 * (x.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True) / (x.std(-1, keepdim=True, correction=0) + 1e-30)).nan_to_num(0, 0, 0) + x * 0
        if name.startswith("log_softmax"):
            return lambda x: x.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True) + x * 0
        return None

    for name, function in functions.items():
        for dtype in FLOATS:
            many = {"ulps": 16.0} if name.startswith(("norm", "var", "std", "softmax", "sum", "mean")) else {}
            yield Case(f"{name} {SHORT[dtype]}", function, [rows((16, 61), dtype, huge=name[:3] not in ("var", "std", "nor"))], scale=size(name), **many)
    x, y = tame((6, 5, 33)), tame((6, 5, 33), F64)
    shapes = {
        "sum all": lambda x: A.sum.default(x),
        "mean all": lambda x: A.mean.default(x),
        "sum empty dims": lambda x: A.sum.dim_IntList(x, []),
        "sum no dims": lambda x: A.sum.dim_IntList(x, None),
        "amax all": lambda x: A.amax.default(x),
        "amax empty dims": lambda x: A.amax.default(x, []),
        "sum two": lambda x: A.sum.dim_IntList(x, [1, 2]),
        "sum two backwards": lambda x: A.sum.dim_IntList(x, [-1, 1], True),
        "mean two": lambda x: A.mean.dim(x, [-2, -1], True),
        "var two": lambda x: A.var.correction(x, [1, -1]),
        "var all": lambda x: A.var.correction(x, None, correction=1),
        "std all": lambda x: A.std.correction(x),
        "norm all": lambda x: A.linalg_vector_norm.default(x, 2.0),
        "logsumexp two": lambda x: A.logsumexp.default(x, [1, 2], True),
        "normalise two": lambda x: A.native_layer_norm.default(x, [5, 33], None, None, 1e-5),
        "sum then broadcast": lambda x: A.div.Tensor(x, A.sum.dim_IntList(A.abs.default(x), [-1], True)),
        "sum squeezed back": lambda x: A.sub.Tensor(x, A.unsqueeze.default(A.mean.dim(x, [2]), -1)),
    }
    for name, function in shapes.items():
        size = lambda x: 4 * x.abs().sum() + 0 * x[:1, :1, :1]
        one = (lambda x, s=size: s(x).reshape(())) if "broadcast" not in name else None
        yield Case(name, function, [x], ulps=8, scale=one)
        yield Case(f"{name} f64", function, [y], ulps=8, scale=one)
    mixed = {
        "sum bf16 to f32": lambda x: A.sum.dim_IntList(x, [-1], dtype=F32),
        "mean bf16 to f32": lambda x: A.mean.dim(x, [-1], True, dtype=F32),
        "norm bf16 to f32": lambda x: A.linalg_vector_norm.default(x, 2, [-1], dtype=F32),
    }
    for name, function in mixed.items():
        yield Case(name, function, [tame((16, 61), BF16)], own=True, ulps=64)
    yield Case("amax bool", lambda m: A.amax.default(m, [-1]), [wide((9, 61), BOOL)])
    yield Case("sum bool", lambda m: A.sum.dim_IntList(m, [-1], dtype=F32), [wide((9, 61), BOOL)], own=True)
    yield Case("sum i64 to f32", lambda n: A.sum.dim_IntList(n, [-1], dtype=F32), [torch.arange(9 * 61).reshape(9, 61)], own=True)
    yield Case("sum long row", lambda x: A.sum.dim_IntList(x, [-1]), [tame((2, 50_001))], ulps=64, scale=lambda x: x.abs().sum(-1))
    for dtype in (F32, F64, BF16):
        x, w, b = tame((7, 5, 33), dtype), tame((33,), dtype, 1), tame((33,), dtype, 2)
        size = lambda x, w, *b: 16 * w.abs() + 4
        yield Case(f"normalise weight {SHORT[dtype]}", lambda x, w: A.native_layer_norm.default(x, [33], w, None, 1e-6)[0], [x, w], scale=size)
        yield Case(f"normalise bias {SHORT[dtype]}", lambda x, b: A.native_layer_norm.default(x, [33], None, b, 1e-6)[0], [x, b], scale=size)
        yield Case(f"normalise both {SHORT[dtype]}", lambda x, w, b: A.native_layer_norm.default(x, [33], w, b, 1e-5)[0], [x, w, b], scale=size)
        c = [A.abs.default(tame((5,), dtype, n)) for n in range(4)]
        norm = A._native_batch_norm_legit_no_training.default
        size = lambda x, *c: 64 * (x.abs() + 8) / 1e-2 + 0 * x
        for name, function in {
            "channels": lambda x, w, b, m, v: norm(x, w, b, m, v, 0.1, 1e-3)[0],
            "channels no weight": lambda x, w, b, m, v: norm(x, None, None, A.add.Tensor(m, w), A.mul.Tensor(v, b), 0.1, 1e-2)[0],
        }.items():
            image = tame((3, 5, 4, 9), dtype)
            yield Case(f"{name} {SHORT[dtype]}", function, [image, *c], scale=size)


def places() -> Iterator[Case]:
    x3, x4 = tame((6, 5, 34)), tame((2, 6, 5, 34))
    t = A.tanh.default
    functions = {
        "view": lambda x: A.view.default(t(x), [30, 34]),
        "view -1": lambda x: A.view.default(t(x), [6, -1]),
        "view cut": lambda x: A.mul.Tensor(A.view.default(t(x), [6, 5, 2, 17]), 2.0),
        "reshape": lambda x: A.reshape.default(t(x), [30, 2, 17]),
        "_unsafe_view": lambda x: A._unsafe_view.default(t(x), [30, 34]),
        "unsqueeze": lambda x: t(A.unsqueeze.default(x, -2)),
        "squeeze": lambda x: A.squeeze.dim(A.unsqueeze.default(t(x), 1), 1),
        "squeeze all": lambda x: A.squeeze.default(A.unsqueeze.default(t(x), 0)),
        "flatten": lambda x: A.flatten.using_ints(t(x), 0, 1),
        "alias detach": lambda x: A.alias.default(A.detach.default(t(x))),
        "transpose": lambda x: t(A.transpose.int(x, 0, 1)),
        "transpose negative": lambda x: A.mul.Tensor(A.transpose.int(x, -3, -2), A.transpose.int(x, 0, 1)),
        "permute": lambda x: t(A.permute.default(x, [1, 0, 2])),
        "permute negative": lambda x: t(A.permute.default(x, [-2, 0, -1])),
        "permute clone": lambda x: A.clone.default(A.permute.default(t(x), [1, 0, 2]), memory_format=torch.contiguous_format),
        "contiguous": lambda x: A.contiguous.default(A.transpose.int(t(x), 0, 1)),
        "clone": lambda x: A.clone.default(A.mul.Tensor(x, 2.0)),
        "expand": lambda x: A.clone.default(A.expand.default(A.unsqueeze.default(t(x), 1), [6, 3, 5, 34]), memory_format=torch.contiguous_format),
        "expand -1": lambda x: A.add.Tensor(x, A.expand.default(A.slice.Tensor(x, 1, 0, 1), [-1, 5, -1])),
        "slice": lambda x: t(A.slice.Tensor(x, 2, 3, 20)),
        "slice negative": lambda x: t(A.slice.Tensor(x, -1, -20, -2)),
        "slice step": lambda x: t(A.slice.Tensor(x, 2, 1, 1 << 62, 2)),
        "slice step rows": lambda x: t(A.slice.Tensor(x, 0, 1, 100, 2)),
        "slice start only": lambda x: t(A.slice.Tensor(x, 1, 2)),
        "slice beyond": lambda x: t(A.slice.Tensor(x, 1, -100, 3)),
        "slice twice": lambda x: A.mul.Tensor(A.slice.Tensor(x, 2, 0, 17), A.slice.Tensor(x, 2, 17, 34)),
        "select": lambda x: t(A.select.int(x, 0, 2)),
        "select negative": lambda x: t(A.select.int(x, -2, -1)),
        "select middle": lambda x: A.add.Tensor(A.select.int(x, 1, 0), A.select.int(x, 1, 4)),
        "split": lambda x: A.mul.Tensor(*A.split.Tensor(x, 17, -1)),
        "split uneven": lambda x: A.add.Tensor(A.slice.Tensor(x, 1, 0, 1), A.split.Tensor(x, 2, 1)[2]),
        "split_with_sizes": lambda x: A.mul.Tensor(A.split_with_sizes.default(x, [10, 10, 14], 2)[0], A.split_with_sizes.default(x, [10, 10, 14], 2)[1]),
        "split_with_sizes last": lambda x: t(A.split_with_sizes.default(x, [10, 10, 14], -1)[2]),
        "split outer": lambda x: A.sub.Tensor(A.split.Tensor(x, 3)[1], A.split.Tensor(x, 3)[0]),
        "unbind": lambda x: A.sub.Tensor(A.unbind.int(x)[5], A.unbind.int(x)[1]),
        "unbind 1": lambda x: A.div.Tensor(A.unbind.int(x, 1)[3], A.unbind.int(x, -2)[1]),
        "cat": lambda x: A.cat.default([A.neg.default(A.slice.Tensor(x, 2, 17, 34)), A.slice.Tensor(x, 2, 0, 17)], -1),
        "cat three": lambda x: A.cat.default([x, t(x), A.slice.Tensor(x, 2, 0, 5)], 2),
        "cat sum": lambda x: A.sum.dim_IntList(A.cat.default([x, A.neg.default(A.slice.Tensor(x, 2, 0, 9))], 2), [-1]),
    }
    for name, function in functions.items():
        yield Case(name, function, [x3], ulps=8, scale=(lambda x: 50 + 0 * x[:1, :1, :1].reshape(())) if "sum" in name else None)
        if name in ("slice step", "cat", "permute", "select middle", "transpose", "split"):
            yield Case(f"{name} bf16", function, [x3.to(BF16)])
            yield Case(f"{name} f64", function, [x3.double()])
    layouts = {
        "columns": torch.randn(34, 9).t(),
        "every second": torch.randn(9, 68)[:, ::2],
        "gap between rows": torch.randn(9, 50)[:, :34],
        "expanded": torch.randn(1, 34).expand(9, 34),
        "expanded row": torch.randn(9, 1).expand(9, 34),
        "every fourth i64": torch.arange(9 * 136).reshape(9, 136)[:, ::4],
        "every third bool": (torch.randn(9, 102) > 0)[:, ::3],
        "every second bf16": torch.randn(9, 68).to(BF16)[:, ::2],
        "channels last": torch.randn(2, 8, 4, 5).to(memory_format=torch.channels_last),
    }
    for name, x in layouts.items():
        exact = not x.dtype.is_floating_point
        yield Case(f"strided {name}", lambda x: A.sigmoid.default(x), [x], own=exact)
        if x.dim() == 2:
            yield Case(f"strided {name} times row", lambda x, y: A.mul.Tensor(x, y), [x, tame((x.shape[1],))], own=exact)
            if x.dtype == F32:
                yield Case(f"strided {name} sum", lambda x: A.sum.dim_IntList(x, [-1]), [x], ulps=8, scale=lambda x: x.abs().sum(-1))
    yield Case("view over rows", lambda x: A.view.default(t(x), [5, 204]), [x3], refused="not affine")
    yield Case("t", lambda x, w: A.mul.Tensor(x, A.t.default(w)), [tame((9, 34)), torch.randn(9, 34).t()])
    yield Case("heads", lambda x: A.clone.default(A.permute.default(A.view.default(t(x), [2, 6, 5, 2, 17]), [0, 1, 3, 2, 4]), memory_format=torch.contiguous_format), [x4])


def products() -> Iterator[Case]:
    """Matrix products alone and with what follows; an error is one of the terms, which cancel."""
    for dtype in FLOATS:
        a, b = tame((29, 47), dtype), tame((47, 37), dtype, 1)
        yield Case(f"mm {SHORT[dtype]}", A.mm.default, [a, b], scale=lambda a, b: a.abs() @ b.abs())
    a, w, bias = tame((3, 11, 53)), tame((41, 53), seed=1), tame((41,), seed=2)
    size = lambda a, w, bias: (a.abs() @ w.abs().t() + bias.abs())  # noqa: E731
    yield Case("linear", lambda a, w, bias: A.linear.default(a, w, bias), [a, w, bias], scale=size)
    yield Case("linear of a transposed", lambda a, w, bias: A.linear.default(A.t.default(a), w, bias), [tame((53, 22)), w, bias], scale=lambda a, w, bias: size(a.t(), w, bias))
    yield Case("linear relu", lambda a, w, bias: A.relu.default(A.linear.default(a, w, bias)), [a, w, bias], scale=size)
    yield Case("linear no bias", lambda a, w, bias: A.add.Tensor(A.linear.default(a, w), bias), [a, w, bias], scale=size)
    m, b, c = tame((19, 31)), tame((31, 43), seed=1), tame((19, 1), seed=2)
    factors = {"beta": -0.5, "alpha": 3}
    yield Case("addmm", lambda m, b, c: A.addmm.default(c, m, b, **factors), [m, b, c], scale=lambda m, b, c: 3 * (m.abs() @ b.abs()) + c.abs())
    nothing = torch.full((43,), NAN)
    yield Case("addmm without", lambda m, b, c: A.addmm.default(c, m, b, beta=0), [m, b, nothing], scale=lambda m, b, c: m.abs() @ b.abs())
    # Terms of one sign: what one long chain of additions loses shows.
    long, other = torch.rand(8, 8192) + 0.5, torch.rand(16, 8192) + 0.5
    yield Case("linear long", lambda a, w: A.linear.default(a, w), [long, other])
    special_rows = [wide((13, 33)), tame((33, 24), seed=1)]
    yield Case("mm special", A.mm.default, special_rows, scale=lambda a, b: a.abs() @ b.abs())
    stepped = [torch.randn(14, 3, 66)[:, 1, ::2], torch.randn(99, 40)[::3]]
    yield Case("mm strided", A.mm.default, stepped, scale=lambda a, b: a.abs() @ b.abs())
    refusals = {
        "of a product": (lambda a, b: A.mm.default(A.mm.default(a, b), b), "multiplies what the region computes"),
        "before a reduction": (lambda a, b: A.sum.dim_IntList(A.mm.default(a, b), [-1]), "before a reduction"),
        "under a comparison": (lambda a, b: A.gt.Scalar(A.mm.default(a, b), 0), "what was computed"),
    }
    for name, (function, reason) in refusals.items():
        yield Case(f"mm {name}", function, [tame((24, 24)), tame((24, 24), seed=1)], refused=reason)


def jumps() -> Iterator[Case]:
    """Where a comparison may stand: on what was not rounded."""
    shape = (9, 61)
    x, y = tame(shape), tame((61,), F32, 1)
    computed = "what was computed"
    exp = A.exp.default
    allowed = {
        "where of input": lambda x, y: A.where.self(A.gt.Scalar(x, 0), exp(x), A.mul.Tensor(x, y)),
        "where of clamp": lambda x, y: A.where.self(A.gt.Tensor(A.clamp.default(x, -1, 1), A.neg.default(y)), x, y),
        "where of relu of view": lambda x, y: A.where.self(A.gt.Tensor(A.relu.default(A.view.default(x, [9, 61])), y), x, y),
        "where of largest": lambda x, y: A.where.self(A.eq.Tensor(x, A.amax.default(x, [-1], True)), x, y),
        "relu of computed": lambda x, y: A.relu.default(A.mul.Tensor(x, y)),
        "threshold 0 of computed": lambda x, y: A.threshold.default(A.mul.Tensor(x, y), 0, 0),
        "leaky_relu of computed": lambda x, y: A.leaky_relu.default(A.mul.Tensor(x, y)),
        "clamp of computed": lambda x, y: A.clamp.Tensor(A.mul.Tensor(x, y), y),
        "isnan of computed": lambda x, y: A.masked_fill.Scalar(A.log.default(x), A.isnan.default(A.log.default(x)), 0),
        "where of rounded input": lambda x, y: A.gt.Tensor(A._to_copy.default(x, dtype=BF16), A._to_copy.default(y, dtype=BF16)),
    }
    for name, function in allowed.items():
        yield Case(name, function, [x, y], own=True)
    refused = {
        "gt of computed": lambda x, y: A.where.self(A.gt.Scalar(A.mul.Tensor(x, y), 0), x, y),
        "eq of sum": lambda x, y: A.eq.Tensor(x, A.sum.dim_IntList(x, [-1], True)),
        "logical_not of computed": lambda x, y: A.logical_not.default(A.sub.Tensor(x, y)),
        "logical_and of computed": lambda x, y: A.logical_and.default(A.sub.Tensor(x, y), A.gt.Scalar(x, 0)),
        "bool of computed": lambda x, y: A._to_copy.default(A.sub.Tensor(x, y), dtype=BOOL),
        "sign of computed": lambda x, y: A.sign.default(A.sub.Tensor(x, y)),
        "threshold of computed": lambda x, y: A.threshold.default(A.sub.Tensor(x, y), 0, 7),
    }
    for name, function in refused.items():
        yield Case(name, function, [x, y], refused=computed)


def all_cases() -> list[Case]:
    """Every case; names are unique."""
    found = [case for part in (pointwise, binary, casts, reductions, places, products, jumps) for case in part()]
    assert len({case.name for case in found}) == len(found), "two cases share a name"
    return found

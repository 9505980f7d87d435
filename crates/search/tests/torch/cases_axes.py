"""More cases of `tests/torch.rs`: reductions over any axes in any layout. See `cases.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cases import A, BF16, F16, F32, F64, I8, Case, rows, tame, wide


def largest(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return 64 * x.abs().nan_to_num(0, 0, 0).max().reshape((1,) * x.dim())


def total(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x.abs().nan_to_num(0, 0, 0).max().double() * 64


def axes() -> Iterator[Case]:
    """One or several axes, leading, in the middle, or spread; images in both layouts; rows of a few elements."""
    reductions = {
        "sum": lambda x, d: A.sum.dim_IntList(x, d),
        "mean": lambda x, d: A.mean.dim(x, d, True),
        "amax": lambda x, d: A.amax.default(x, d),
        "amin": lambda x, d: A.amin.default(x, d, True),
        "var": lambda x, d: A.var.correction(x, d),
        "std": lambda x, d: A.std.correction(x, d, correction=0, keepdim=True),
        "var_mean": lambda x, d: A.var_mean.correction(x, d, correction=0),
        "logsumexp": lambda x, d: A.logsumexp.default(x, d),
        "norm": lambda x, d: A.linalg_vector_norm.default(x, 2, d),
        "norm 1": lambda x, d: A.linalg_vector_norm.default(x, 1, d, True),
    }
    places = {"0": [0], "1": [1], "2 3": [2, 3], "0 2 3": [0, 2, 3], "0 1": [0, 1], "1 3": [1, 3], "0 1 2": [0, 1, 2]}
    number = 0
    for name, function in reductions.items():
        for place, dims in places.items():
            number += 1
            # Every reduction meets both layouts; the types take turns.
            last = number % 2 == 0
            dtype = (F32, F32, F64, BF16, F32)[number % 5]
            x = tame((3, 20, 9, 17), dtype, number)
            x = x.contiguous(memory_format=torch.channels_last) if last else x
            wanted = lambda x, f=function, d=dims: f(x, d)
            yield Case(f"{name} over {place}{' last' if last else ''}", wanted, [x], ulps=32, scale=total)
    special = {
        "mean 2 3": lambda x: A.mean.dim(x, [2, 3], True),
        "amax 1": lambda x: A.amax.default(x, [1]),
        "logsumexp 1": lambda x: A.logsumexp.default(x, [1]),
        "softmax 1": lambda x: A._softmax.default(x, 1, False),
        "log_softmax 0": lambda x: A._log_softmax.default(x, 0, False),
        "var 0": lambda x: A.var.correction(x, [0], correction=0),
    }
    for name, function in special.items():
        for dtype in (F32, F16):
            x = rows((18, 61), dtype, huge=False).t().reshape(61, 18, 1, 1).expand(61, 18, 3, 4).contiguous()
            size = largest if "soft" in name else total
            yield Case(f"columns {name} {dtype}", function, [x], ulps=32, scale=size)
    t = A.tanh.default
    functions = {
        "centre columns": lambda x: A.sub.Tensor(x, A.mean.dim(x, [0], True)),
        "normalise columns": lambda x: A.mul.Tensor(A.sub.Tensor(x, A.mean.dim(x, [1], True)), A.rsqrt.default(A.add.Tensor(A.var.correction(x, [1], correction=0, keepdim=True), 1e-5))),
        "softmax 0 of tanh": lambda x: A._softmax.default(t(x), 0, False),
        "softmax 1": lambda x: A._softmax.default(x, 1, False),
        "sum 1 of product": lambda x: A.sum.dim_IntList(A.mul.Tensor(x, t(x)), [1]),
        "shares of both": lambda x: A.div.Tensor(x, A.sum.dim_IntList(A.abs.default(x), [0, 1], True)),
    }
    for name, function in functions.items():
        yield Case(name, function, [tame((19, 6, 43))], ulps=32, scale=largest if "sum" not in name else total)
        yield Case(f"{name} long", function, [tame((1300, 2, 9))], ulps=64, scale=largest if "sum" not in name else total)
    layer = lambda x, w, b: A.native_layer_norm.default(A.permute.default(A.mul.Tensor(x, 2.0), [0, 2, 3, 1]), [20], w, b, 1e-6)[0]
    image, w, b = tame((3, 20, 9, 17)), tame((20,), F32, 1), tame((20,), F32, 2)
    yield Case("normalise channels", layer, [image.contiguous(memory_format=torch.channels_last), w, b], ulps=32, scale=lambda x, *_: largest(x.permute(0, 2, 3, 1)))
    # PyTorch writes the result in another layout than it reads.
    yield Case("normalise channels of rows", layer, [image, w, b], refused="against the grain")
    yield Case("softmax of few", lambda x: A.amax.default(x, [2]), [tame((9, 40, 5))])
    yield Case("sum of three", lambda x: A.sum.dim_IntList(t(x), [-1]), [tame((500, 3))], ulps=16, scale=total)
    yield Case("mean all spread", lambda x: A.mean.dim(A.slice.Tensor(x, 2, 0, 9), [0, 1, 2]), [tame((7, 5, 30))], ulps=16, scale=total)


def groups() -> Iterator[Case]:
    norm = A.native_group_norm.default
    for dtype in (F32, F64, BF16):
        for last in (False, True):
            x = tame((3, 24, 5, 7), dtype)
            x = x.contiguous(memory_format=torch.channels_last) if last else x
            w, b = tame((24,), dtype, 1), tame((24,), dtype, 2)
            layout = f"{dtype}{' last' if last else ''}"
            yield Case(f"groups {layout}", lambda x, w, b: norm(x, w, b, 3, 24, 35, 3, 1e-5)[0], [x, w, b], ulps=64, scale=largest)
            if dtype != F32 or last:
                continue
            yield Case("groups silu", lambda x, w, b: A.silu.default(norm(x, w, b, 3, 24, 35, 6, 1e-5)[0]), [x, w, b], ulps=64, scale=largest)
            yield Case("groups of one channel", lambda x, w: norm(x, w, None, 3, 24, 35, 24, 1e-5)[0], [x, w], ulps=64, scale=largest)
            yield Case("one group", lambda x: norm(x, None, None, 3, 24, 35, 1, 1e-5), [x], ulps=64, scale=largest)
    yield Case("groups of rows", lambda x, w, b: norm(x, w, b, 2, 6, 40, 2, 1e-3)[0], [tame((2, 6, 40)), tame((6,)), tame((6,), F32, 1)], ulps=64, scale=largest)


def places_of_extremes() -> Iterator[Case]:
    for name in ("argmax", "argmin"):
        find = getattr(A, name).default
        for dtype in (F32, F64, BF16, F16, I8):
            x = rows((16, 61), dtype) if dtype.is_floating_point else wide((16, 61), dtype)
            yield Case(f"{name} {dtype}", lambda x, f=find: f(x, -1), [x], own=True)
        yield Case(f"{name} keep", lambda x, f=find: f(x, 1, True), [rows((16, 61))], own=True)
        yield Case(f"{name} columns", lambda x, f=find: f(x, 0), [rows((16, 61)).t().contiguous()], own=True)
        yield Case(f"{name} all", lambda x, f=find: f(x), [tame((7, 61))], own=True)
        yield Case(f"{name} middle of ties", lambda x, f=find: f(x, 1), [tame((4, 33, 20)).round()], own=True)
        yield Case(f"{name} of relu", lambda x, f=find: f(A.relu.default(x), -1), [rows((16, 61))], own=True)
        yield Case(f"{name} of computed", lambda x, f=find: f(A.mul.Tensor(x, x), -1), [tame((16, 61))], refused="what was computed")
        yield Case(f"{name} i64", lambda x, f=find: f(x, -1), [torch.arange(9 * 61).reshape(9, 61)], refused="counts further")




def scans() -> Iterator[Case]:
    """Sums and products of beginnings, along any dimension; a NaN or an infinity stays to the end of its row."""
    total = lambda x: A.cumsum.default(x.abs().nan_to_num(0, 0, 0), -1) * 4 + 1e-30
    t = A.tanh.default
    for dtype in (F32, F64, BF16, F16):
        yield Case(f"cumsum {dtype}", lambda x: A.cumsum.default(x, -1), [rows((16, 61), dtype, huge=False)], ulps=8, scale=total)
        x = (tame((9, 45), dtype).double().abs().clamp(0.5, 1.5)).to(dtype)
        yield Case(f"cumprod {dtype}", lambda x: A.cumprod.default(x, 1), [x], ulps=64)
    down = lambda x: x.abs().cumsum(1) * 4 + 1e-30
    yield Case("cumsum columns", lambda x: A.cumsum.default(x, 1), [tame((3, 50, 37))], ulps=8, scale=down)
    yield Case("cumsum columns f64", lambda x: A.cumsum.default(x, 1), [tame((3, 50, 37), F64)], ulps=8, scale=down)
    yield Case("cumsum columns infinite", lambda x: A.cumsum.default(x, 1), [rows((16, 61)).t().reshape(1, 61, 16).contiguous()], ulps=8, scale=lambda x: x.abs().nan_to_num(0, 0, 0).max().reshape(1, 1, 1) * 64)
    yield Case("cumprod columns", lambda x: A.cumprod.default(x, 0), [tame((20, 37)).abs().clamp(0.5, 1.5)], ulps=64)
    yield Case("cumsum of product", lambda x, y: A.mul.Tensor(A.cumsum.default(A.mul.Tensor(x, y), -1), y), [tame((7, 200)), tame((7, 200), seed=1)], ulps=64,
               scale=lambda x, y: (x * y).abs().cumsum(-1) * 16 * y.abs() + 1e-30)
    yield Case("cumsum and mean", lambda x: A.sub.Tensor(A.cumsum.default(t(x), -1), A.mean.dim(A.cumsum.default(t(x), -1), [-1], True)), [tame((7, 200))], ulps=8, scale=lambda x: 64 * x.shape[-1] + 0 * x)
    yield Case("cumsum bf16 to f32", lambda x: A.cumsum.default(x, -1, dtype=F32), [tame((7, 100), BF16)], own=True, ulps=16, scale=lambda x: x.abs().cumsum(-1) * 16 + 1e-30)
    yield Case("cumsum turned", lambda x: A.flip.default(A.cumsum.default(x, -1), [-1]), [tame((7, 100))], refused="another order")
    yield Case("cumsum long", lambda x: A.cumsum.default(x, -1), [tame((2, 20_001))], ulps=16, scale=lambda x: x.abs().cumsum(-1) / 16)




def losses() -> Iterator[Case]:
    """Cross entropies: classes that are ignored, weights, all ways to reduce; sums over rows of sums along them."""
    g = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 61, (16,), generator=g)
    ignoring = labels.clone()
    ignoring[::5] = -100
    size = lambda x, *_: 64 * x.abs().max()
    logs = lambda x: A._log_softmax.default(x, 1, False)
    nll = A.nll_loss_forward.default
    for dtype in (F32, F64, BF16):
        x, w = tame((16, 61), dtype) * 4, tame((61,), dtype, 1).abs()
        yield Case(f"cross entropy {dtype}", lambda x, t: nll(logs(x), t, None, 1, -100)[0], [x, labels], ulps=16, scale=size)
        yield Case(f"cross entropy weighed {dtype}", lambda x, t, w: nll(logs(x), t, w, 1, -100), [x, ignoring, w], ulps=64, scale=size)
    x = tame((16, 61))
    yield Case("cross entropy ignoring", lambda x, t: nll(logs(x), t, None, 1, -100), [x, ignoring], ulps=16, scale=size)
    yield Case("cross entropy ignoring 3", lambda x, t: nll(logs(x), t, None, 2, 3), [x, labels.clamp(0, 5)], ulps=16, scale=size)
    yield Case("cross entropy of each", lambda x, t: nll(logs(x), t, None, 0, -100)[0], [x, ignoring], ulps=16, scale=lambda x, t: 64 * x.abs().max().reshape(1))
    yield Case("cross entropy scaled", lambda x, t: A.mul.Tensor(nll(logs(A.mul.Tensor(x, 2.0)), t, None, 1, -100)[0], 0.5), [x, labels], ulps=16, scale=size)
    yield Case("mean of sums", lambda x, y: A.mean.default(A.sum.dim_IntList(A.mul.Tensor(x, y), [-1])), [x, tame((16, 61), seed=3)], ulps=32, scale=size)
    yield Case("sum of norms", lambda x: A.sum.default(A.linalg_vector_norm.default(x, 2, [-1], True)), [x], ulps=32, scale=size)
    yield Case("divergence", lambda x, y: A.neg.default(A.mean.default(A.sum.dim_IntList(A.mul.Tensor(A._softmax.default(y, 1, False), logs(x)), [1]))), [x, tame((16, 61), seed=3)], ulps=32, scale=size)


def all_cases() -> list[Case]:
    """Every case; names are unique, also beside those of the other files."""
    parts = (axes, groups, places_of_extremes, scans, losses)
    return [case for part in parts for case in part()]

"""More cases of `tests/torch.rs`: pieces, windows and indices. See `cases.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cases import A, BF16, F16, F32, F64, BOOL, INF, Case, tame, wide


def image(shape: tuple[int, ...], dtype: torch.dtype = F32, last: bool = False, seed: int = 0) -> torch.Tensor:
    x = wide(shape, dtype, seed)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def pieces() -> Iterator[Case]:
    """Concatenations, padding, rolls, flips, repeats along any dimension."""
    t = A.tanh.default
    functions = {
        "cat rows": lambda x: A.cat.default([x, t(x)], 0),
        "cat middle": lambda x: A.cat.default([t(x), A.slice.Tensor(x, 1, 0, 2), x], 1),
        "cat rows of views": lambda x: A.cat.default([A.neg.default(A.slice.Tensor(x, 0, 3, 6)), A.slice.Tensor(x, 0, 0, 3)], 0),
        "cat then view": lambda x: t(A.view.default(A.cat.default([x, x], 1), [6, 2, 5, 34])),
        "cat of cat": lambda x: A.cat.default([A.cat.default([x, t(x)], 0), A.cat.default([x, x], 0)], -1),
        "cat one": lambda x: A.cat.default([t(x)], 1),
        "cat then softmax": lambda x: A._softmax.default(A.cat.default([x, A.neg.default(x)], 1), -1, False),
        "cat of softmax": lambda x: A.cat.default([A._softmax.default(x, -1, False), x], 0),
        "stack": lambda x: A.stack.default([x, t(x)]),
        "stack last": lambda x: A.stack.default([t(x), x, A.neg.default(x)], 1),
        "stack -2": lambda x: A.stack.default([t(x), x], -2),
        "pad last": lambda x: t(A.constant_pad_nd.default(x, [1, 2])),
        "pad rows": lambda x: A.constant_pad_nd.default(t(x), [0, 0, 2, 1], 1.5),
        "pad both": lambda x: A.constant_pad_nd.default(t(x), [3, 0, 1, 1, 0, 2], -INF),
        "pad negative": lambda x: A.constant_pad_nd.default(t(x), [-3, 2, -1, -1]),
        "pad then sum": lambda x: A.amax.default(A.constant_pad_nd.default(t(x), [1, 3, 1, 0], 0.25), [-1]),
        "roll": lambda x: t(A.roll.default(x, [5], [2])),
        "roll rows": lambda x: t(A.roll.default(x, [-2], [0])),
        "roll two": lambda x: A.mul.Tensor(A.roll.default(t(x), [1, -7], [1, 2]), 2.0),
        "roll over": lambda x: t(A.roll.default(x, [17, 3], [1, -1])),
        "flip": lambda x: t(A.flip.default(x, [2])),
        "flip rows": lambda x: A.mul.Tensor(A.flip.default(t(x), [0, 1]), 2.0),
        "flip both": lambda x: A.sub.Tensor(A.flip.default(x, [-1, 0]), x),
        "repeat": lambda x: t(A.repeat.default(x, [1, 1, 2])),
        "repeat rows": lambda x: t(A.repeat.default(x, [3, 2, 1])),
        "repeat new": lambda x: A.repeat.default(t(x), [2, 1, 1, 1]),
    }
    for name, function in functions.items():
        refused = "another number of elements" if name == "cat of softmax" else None
        yield Case(name, function, [tame((6, 5, 34))], ulps=8, refused=refused)
        if name in ("cat middle", "pad both", "roll two", "flip", "repeat rows", "stack last"):
            yield Case(f"{name} bf16", function, [tame((6, 5, 34), BF16)], own=True)
            yield Case(f"{name} f64", function, [tame((6, 5, 34), F64)])
    yield Case("cat bool", lambda m: A.cat.default([m, A.logical_not.default(m)], 0), [wide((9, 61), BOOL)])
    yield Case("pad bool", lambda m: A.constant_pad_nd.default(A.logical_not.default(m), [1, 1, 1, 0], 1), [wide((9, 61), BOOL)])
    yield Case("pad f16 value", lambda x: A.constant_pad_nd.default(x, [1, 1, 1, 0], 0.1), [tame((9, 61), F16)], own=True)
    yield Case("pad image", lambda x: t(A.constant_pad_nd.default(x, [0, 1, 0, 1], 0.0)), [image((2, 3, 8, 9))], ulps=8)
    yield Case("pad image last", lambda x: t(A.constant_pad_nd.default(x, [1, 1, 1, 1], 0.0)), [image((2, 16, 8, 9), last=True)], ulps=8)
    yield Case("roll image of tokens", lambda x: t(A.roll.default(x, [-3, -3], [1, 2])), [tame((2, 7, 14, 24))], ulps=8)


def windows() -> Iterator[Case]:
    """Pooling and interpolation; windows that stick out, NaN and infinities, both layouts."""
    pool, mean = A.max_pool2d_with_indices.default, A.avg_pool2d.default
    functions = {
        "max_pool 2": lambda x: pool(x, [2, 2])[0],
        "max_pool 3 2 1": lambda x: pool(x, [3, 3], [2, 2], [1, 1])[0],
        "max_pool 3 1 1": lambda x: pool(x, [3], [1], [1])[0],
        "max_pool dilated": lambda x: pool(x, [3, 2], [1, 2], [1, 0], [2, 3])[0],
        "max_pool ceil": lambda x: pool(x, [3, 3], [2, 2], [0, 0], [1, 1], True)[0],
        "max_pool 5 1 2": lambda x: pool(x, [5, 5], [1, 1], [2, 2])[0],
        "max_pool of relu": lambda x: A.relu.default(pool(A.relu.default(x), [3, 3], [2, 2], [1, 1])[0]),
        "avg_pool 2": lambda x: mean(x, [2, 2]),
        "avg_pool 3 1 1": lambda x: mean(x, [3, 3], [1, 1], [1, 1]),
        "avg_pool 3 2 1": lambda x: mean(x, [3, 3], [2, 2], [1, 1], False, False),
        "avg_pool ceil": lambda x: mean(x, [3, 3], [2, 2], [1, 1], True, True),
        "avg_pool ceil without": lambda x: mean(x, [3, 2], [2, 2], [1, 1], True, False),
        "avg_pool divisor": lambda x: mean(x, [3, 3], [1, 1], [1, 1], False, True, 7),
        "avg_pool minus": lambda x: A.sub.Tensor(mean(x, [3, 3], [1, 1], [1, 1], False, False), x),
    }
    for number, (name, function) in enumerate(functions.items()):
        for last in (False, True):
            dtype = (F32, F32, BF16, F64)[(number + last) % 4]
            x = image((2, 19 if last else 3, 11, 23), dtype, last)
            if name.startswith("avg"):
                x = x.clamp(-1e4, 1e4).nan_to_num(0.5)
            largest = (lambda x: x.abs().max().reshape(1, 1, 1, 1)) if name.startswith("avg") else None
            yield Case(f"{name}{' last' if last else ''}", function, [x], scale=largest)
    smooth, nearest = A.upsample_bilinear2d.default, A.upsample_nearest2d.default
    functions = {
        "bilinear 2": lambda x: smooth(x, [22, 46], False, 2.0, 2.0),
        "bilinear size": lambda x: smooth(x, [17, 31], False),
        "bilinear corners": lambda x: smooth(x, [30, 29], True),
        "bilinear smaller": lambda x: smooth(x, [5, 11], False),
        "bilinear factor": lambda x: smooth(x, [16, 34], False, 1.5, 1.5),
        "bilinear of tanh": lambda x: A.add.Tensor(smooth(A.tanh.default(x), [22, 46], False), 1.0),
        "nearest 2": lambda x: nearest(x, [22, 46], 2.0, 2.0),
        "nearest size": lambda x: A.tanh.default(nearest(x, [17, 31])),
        "nearest smaller": lambda x: nearest(x, [5, 11]),
    }
    for number, (name, function) in enumerate(functions.items()):
        for last in (False, True):
            dtype = (F32, F32, BF16, F64)[(number + 2 * last) % 4]
            x = tame((2, 19 if last else 3, 11, 23), dtype)
            x = x.contiguous(memory_format=torch.channels_last) if last else x
            yield Case(f"{name}{' last' if last else ''}", function, [x], ulps=16, scale=lambda x: 4 + 0 * x[:1, :1, :1, :1])


def indices() -> Iterator[Case]:
    """Embeddings, gathers and indexing; indices inside of bounds, negative ones where PyTorch takes them."""
    g = torch.Generator().manual_seed(3)

    def whole(shape: tuple[int, ...], size: int, low: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, size, shape, generator=g, dtype=dtype)

    t = A.tanh.default
    for dtype in (F32, BF16, F64):
        yield Case(f"embedding {dtype}", lambda w, i: A.embedding.default(w, i), [tame((31, 40), dtype), whole((3, 7), 31)])
    yield Case("embedding i32 scaled", lambda w, i: A.mul.Tensor(A.embedding.default(w, i), 2.5), [tame((31, 40)), whole((3, 7), 31, dtype=torch.int32)])
    yield Case("embedding padding", lambda w, i: A.embedding.default(w, i, 0), [tame((31, 40)), whole((21,), 31)])
    yield Case("embeddings and norm", lambda w, v, i, j: A.native_layer_norm.default(A.add.Tensor(A.embedding.default(w, i), A.embedding.default(v, j)), [40], None, None, 1e-5)[0],
               [tame((31, 40)), tame((9, 40), seed=1), whole((3, 7), 31), whole((1, 7), 9)], ulps=64)
    yield Case("embedding of tanh", lambda w, i: A.embedding.default(t(w), i), [tame((31, 40)), whole((8,), 31)], ulps=8)
    x = tame((6, 5, 34))
    yield Case("index_select rows", lambda x, i: t(A.index_select.default(x, 0, i)), [x, whole((9,), 6)], ulps=8)
    yield Case("index_select last", lambda x, i: t(A.index_select.default(x, -1, i)), [x, whole((50,), 34)], ulps=8)
    yield Case("gather last", lambda x, i: A.gather.default(t(x), 2, i), [x, whole((6, 5, 20), 34)], ulps=8)
    yield Case("gather rows", lambda x, i: t(A.gather.default(x, 0, i)), [x, whole((4, 5, 34), 6)], ulps=8)
    yield Case("gather expanded", lambda x, i: t(A.gather.default(x, 2, A.expand.default(i, [6, 5, 34]))), [x, whole((1, 5, 34), 34)], ulps=8)
    yield Case("gather bf16", lambda x, i: A.neg.default(A.gather.default(x, 1, i)), [x.to(BF16), whole((6, 3, 34), 5)])
    yield Case("index one", lambda x, i: t(A.index.Tensor(x, [i])), [x, whole((4, 3), 6, -6)], ulps=8)
    yield Case("index last", lambda x, i: t(A.index.Tensor(x, [None, None, i])), [x, whole((40,), 34, -34)], ulps=8)
    yield Case("index two", lambda x, i, j: t(A.index.Tensor(x, [i, j])), [x, whole((7,), 6, -6), whole((3, 1), 5)], ulps=8)
    yield Case("index apart", lambda x, i, j: t(A.index.Tensor(x, [i, None, j])), [x, whole((11,), 6), whole((11,), 34)], refused="rows of only")
    yield Case("index middle", lambda x, i: A.add.Tensor(A.index.Tensor(x, [None, i]), 1.0), [x, whole((8,), 5)])
    yield Case("index of bias", lambda x, b, i: A.add.Tensor(x, A.index.Tensor(b, [None, i])), [tame((4, 9, 25)), tame((9, 12), seed=2), whole((25,), 12)])
    yield Case("index of index", lambda x, i, j: t(A.index_select.default(A.index_select.default(x, 0, i), 0, j)), [x, whole((4,), 6), whole((9,), 4)], ulps=8)
    yield Case("index of indices", lambda x, i, j: t(A.index_select.default(x, 0, A.index_select.default(i, 0, j))), [x, whole((4,), 6), whole((9,), 4)], ulps=8)
    yield Case("index by mask", lambda x, m: A.where.self(m, x, t(x)), [x, wide((6, 5, 34), BOOL)], ulps=8)
    yield Case("computed index", lambda w, i: A.embedding.default(w, A.add.Tensor(i, 1)), [tame((31, 40)), whole((8,), 30)], refused="computes in i64")


def all_cases() -> list[Case]:
    """Every case; names are unique, also beside those of the other files."""
    parts = (pieces, windows, indices)
    return [case for part in parts for case in part()]

"""Element types, descriptions of tensors (``TensorMeta``) and tensors on disk (``TensorFile``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("f64", "f32", "f16", "bf16")


def meta(tensor: torch.Tensor) -> dict[str, Any] | None:
    """``{"dtype", "shape", "stride"}``, or ``None`` where the wire format has no words for it:
    symbolic sizes, sparse and quantised layouts, complex and 8-bit float types."""
    name = NAMES.get(tensor.dtype)
    if name is None or tensor.layout != torch.strided:
        return None
    shape, stride = list(tensor.shape), list(tensor.stride())
    if not all(type(size) is int and size >= 0 for size in shape + stride):
        return None
    return {"dtype": name, "shape": shape, "stride": stride}


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of storage from the first to the last one that the strides reach."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride))


def as_described(tensor: torch.Tensor, description: dict[str, Any]) -> torch.Tensor:
    """The same values with dtype and strides as described, in fresh memory."""
    shape, stride = description["shape"], description["stride"]
    storage = torch.zeros(extent(shape, stride), dtype=DTYPES[description["dtype"]])
    result = storage.as_strided(shape, stride)
    if result.numel():
        # An expanded dimension is one place in memory: write it once.
        index = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
        result[index].copy_(tensor.expand(shape)[index])
    return result


def write(tensor: torch.Tensor, path: Path) -> dict[str, Any]:
    """Writes the storage that the strides reach; returns the TensorFile."""
    description = meta(tensor)
    if description is None:
        raise ValueError(f"no wire format for a tensor of {tensor.dtype}, {tensor.layout}, {tuple(tensor.shape)}")
    tensor = tensor.detach()
    count = extent(description["shape"], description["stride"])
    flat = tensor.as_strided((count,), (1,), tensor.storage_offset()) if count else tensor.new_empty(0)
    with open(path, "wb") as file:
        if count:
            file.write(memoryview(flat.view(torch.uint8).numpy()))
    return {"file": str(path), **description}


def read(file: dict[str, Any]) -> torch.Tensor:
    """The tensor in fresh memory of torch's allocator, with strides as described."""
    dtype, shape, stride = DTYPES[file["dtype"]], file["shape"], file["stride"]
    count = extent(shape, stride)
    storage = torch.empty(count, dtype=dtype)
    size = count * storage.element_size()
    with open(file["file"], "rb") as source:
        if count and source.readinto(memoryview(storage.view(torch.uint8).numpy())) != size:
            raise ValueError(f"{file['file']} is shorter than its description")
        if source.read(1):
            raise ValueError(f"{file['file']} is longer than its description")
    return storage.as_strided(shape, stride)

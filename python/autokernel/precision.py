"""How many significant bits element types hold, and rounding to fewer."""

from __future__ import annotations

import torch

BITS: dict[torch.dtype, int] = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

# What a kernel may be tempted to compute in: for fp32 the digits of fp16 or TF32 and of bf16, for 16-bit types
# those of bf16 and of 8-bit floats.
LOWER: dict[int, tuple[int, ...]] = {53: (24, 11), 24: (11, 8), 11: (8, 5), 8: (5, 4)}


def rounded(t: torch.Tensor, bits: int) -> torch.Tensor:
    """To ``bits`` significant bits, to nearest, in any range of exponents: a type that is small on purpose
    would show its overflow, not its digits."""
    if not t.is_floating_point():
        return t
    fraction, exponent = torch.frexp(t if t.dtype in (torch.float32, torch.float64) else t.float())
    return torch.ldexp(fraction.mul_(2.0**bits).round_(), exponent - bits).to(t.dtype)

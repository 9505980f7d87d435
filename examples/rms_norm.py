"""RMSNorm by hand on 1024 x 4096 fp32: the smallest useful input."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.eps = eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.eps) * self.weight


def get_init_inputs():
    return [4096]


def get_inputs():
    return [torch.randn(1024, 4096)]

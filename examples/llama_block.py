"""One decoder block in the style of Llama, written the way people write it by hand.

RMSNorm from elementary operations, rotary embedding in the half-split layout,
grouped-query attention through ``scaled_dot_product_attention``, SwiGLU.
Shapes: 1 x 256 tokens, width 1024, fp32.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 1024
HEADS = 16
KV_HEADS = 4
HEAD_DIM = WIDTH // HEADS
HIDDEN = 2816
TOKENS = 256


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width) + 0.1 * torch.randn(width))
        self.eps = eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.eps) * self.weight


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        groups = HEADS // KV_HEADS
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, tokens, HEADS * HEAD_DIM)
        return self.o_proj(y)


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = RMSNorm(WIDTH)
        self.attention = Attention()
        self.feed_forward_norm = RMSNorm(WIDTH)
        self.feed_forward = SwiGLU()
        frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angle = torch.outer(torch.arange(TOKENS).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos()[None, None])
        self.register_buffer("sin", angle.sin()[None, None])

    def forward(self, x):
        tokens = x.shape[1]
        cos, sin = self.cos[:, :, :tokens], self.sin[:, :, :tokens]
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


def get_init_inputs():
    return []


def get_inputs():
    return [torch.randn(1, TOKENS, WIDTH)]

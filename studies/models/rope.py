"""Rotary position embedding from tables that are the same fp32 bits on every machine.

    cos_TD, sin_TD = rope_tables(tokens=16, head_dim=64, base=1e5)
    q = apply_rope(q, cos_TD, sin_TD)                       # q: [..., T, head_dim] fp32

Legend: T tokens, D = head_dim / 2 frequencies. No libm: angles, sines and cosines are computed with 50 decimal digits in Python's
`decimal` (integer arithmetic) and rounded to fp64, then to fp32. transformers computes angles in fp32, so its tables are off by up to
position * 2^-24; ours are what the formula says. Source: RoFormer, Su et al. 2021, arXiv 2104.09864, eq. 34, in the half-split order.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from functools import lru_cache

import torch

_DIGITS = 50  # the rotation loses about one unit in the last place a position: 46 digits are left after 8,192


@lru_cache(maxsize=8)
def rope_tables(*, tokens: int, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos_TD, sin_TD), fp32, of the angles p * base^(-2i/head_dim). Do not write into them: they are cached.

    Raises ValueError for an odd head or no tokens.
    """
    if tokens < 1 or head_dim < 2 or head_dim % 2 or not base > 1:
        raise ValueError(f"need tokens >= 1, an even head_dim and base > 1, got {tokens=} {head_dim=} {base=}; take them from LlamaConfig")
    with localcontext(Context(prec=_DIGITS)):
        log_base = Decimal(base).ln()
        columns = [_rotations((log_base * (-2 * i) / head_dim).exp(), tokens) for i in range(head_dim // 2)]
    cos_DT, sin_DT = ([[float(pair[part]) for pair in column] for column in columns] for part in (0, 1))
    return tuple(torch.tensor(table, dtype=torch.float64).float().T.contiguous() for table in (cos_DT, sin_DT))  # type: ignore[return-value]


def apply_rope(x_TH: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotates fp32 [..., T, head_dim]: (a, b) -> (a cos - b sin, b cos + a sin), each product and each sum rounded once."""
    a, b = x_TH.chunk(2, dim=-1)
    return torch.cat([a * cos_TD - b * sin_TD, b * cos_TD + a * sin_TD], dim=-1)


def _rotations(theta: Decimal, tokens: int) -> list[tuple[Decimal, Decimal]]:
    """(cos, sin) of p * theta for p = 0, 1, ...: by the addition theorem from those of theta."""
    cos_1, sin_1 = _cos_sin(theta)
    rows = [(Decimal(1), Decimal(0))]
    for _ in range(tokens - 1):
        cos, sin = rows[-1]
        rows.append((cos * cos_1 - sin * sin_1, sin * cos_1 + cos * sin_1))
    return rows


def _cos_sin(theta: Decimal) -> tuple[Decimal, Decimal]:
    """The Taylor series of both, for 0 < theta <= 1."""
    sums, term, n = [Decimal(0), Decimal(0)], Decimal(1), 0
    while abs(term) > Decimal(10) ** -(_DIGITS + 2):
        sums[n % 2] += term if n % 4 < 2 else -term
        n += 1
        term = term * theta / n
    return sums[0], sums[1]

"""Claims about rotary tables and the rotation on the CPU."""

import math
from decimal import Context, Decimal, localcontext

import pytest
import torch

from kernels.exact import digest, philox_bell
from kernels.exact.rope import _cos_sin, _rotations, apply_rope, rope_ref, rope_tables

# (head_dim, base) -> the first 16 hex digits of the tables' digests (cos, sin), 8,192 positions. They are constants of this project:
# every golden digest of a model behind them changes with them.
PINNED = {
    (64, 1e4): ("453f071074b412a0", "7f0c72aaf5885710"),
    (64, 1e5): ("35ebec3d100cc20d", "9574868eaa1a5b0e"),
    (64, 1e6): ("040c40202fc13711", "458749f55d006cc0"),
    (128, 1e4): ("5898388f515bac4b", "85e3526f933f2f05"),
    (128, 1e5): ("d05018d8c82c84b9", "789ec9248e6e4417"),
    (128, 1e6): ("17fbcd76a412edc1", "88bec7d21893f193"),
}


@pytest.mark.parametrize("head_dim, base", PINNED)
def test_long_tables_have_the_pinned_digests(head_dim: int, base: float) -> None:
    assert tuple(digest(table)[:16] for table in rope_tables(tokens=8192, head_dim=head_dim, base=base)) == PINNED[head_dim, base]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 700])
def test_tables_are_those_of_the_decimal_recurrence(tokens: int) -> None:
    """Seeds and double-double products against 50 digits at every position; also around a whole number of seeds."""
    with localcontext(Context(prec=50)):
        for i, part in ((0, 0), (1, 1), (7, 0), (7, 1), (31, 0), (31, 1)):
            theta = (Decimal(1e5).ln() * (-2 * i) / 64).exp()
            want = torch.tensor([float(row[part]) for row in _rotations(*_cos_sin(theta), tokens)], dtype=torch.float64).float()
            assert torch.equal(rope_tables(tokens=tokens, head_dim=64, base=1e5)[part][:, i], want)


def test_a_longer_table_begins_with_the_shorter_and_is_near_fp64() -> None:
    cos, sin = rope_tables(tokens=300, head_dim=16, base=1e4)
    assert all(torch.equal(short, long[:70]) for short, long in zip(rope_tables(tokens=70, head_dim=16, base=1e4), (cos, sin), strict=True))
    p, i = 299, 3
    assert abs(float(cos[p, i]) - math.cos(p * 1e4 ** (-2 * i / 16))) <= 2.0**-24 and abs(float(sin[p, i]) - math.sin(p * 1e4 ** (-2 * i / 16))) <= 2.0**-24
    assert cos[0].tolist() == [1.0] * 8 and sin[0].tolist() == [0.0] * 8


@pytest.mark.parametrize("bad", [dict(tokens=0), dict(head_dim=7), dict(base=1.0), dict(base=math.inf), dict(base=math.nan)])
def test_tables_name_what_is_wrong(bad: dict) -> None:
    with pytest.raises(ValueError, match="need tokens >= 1, an even head_dim"):
        rope_tables(**{**dict(tokens=4, head_dim=8, base=1e4), **bad})


def operands() -> tuple[torch.Tensor, ...]:
    return philox_bell((2, 3, 5, 16), 1), torch.tensor([[0, 7, 3], [31, 0, 12]]), *rope_tables(tokens=32, head_dim=16, base=1e4)


def test_each_token_is_turned_by_its_own_position_in_stated_roundings() -> None:
    x, position, cos, sin = operands()
    y = rope_ref(x, position, cos, sin)
    for b, t, h, d in ((0, 1, 4, 2), (1, 0, 0, 7), (1, 2, 3, 0)):
        p = int(position[b, t])
        first, second, c, s = x[b, t, h, d], x[b, t, h, 8 + d], cos[p, d], sin[p, d]
        assert float(y[b, t, h, d]) == float(first * c - second * s) and float(y[b, t, h, 8 + d]) == float(second * c + first * s)
    same = rope_ref(x[:1], torch.tensor([[4, 5, 6]], dtype=torch.int32), cos, sin)
    assert torch.equal(same.transpose(1, 2), apply_rope(x[:1].transpose(1, 2), cos[4:7], sin[4:7]))


def test_views_other_dtypes_and_empty_batches_are_right() -> None:
    x, position, cos, sin = operands()
    want = rope_ref(x, position, cos, sin, out_dtype=torch.bfloat16)
    wide = torch.cat([x, x], dim=2)
    assert torch.equal(rope_ref(wide[:, :, :5], position, cos, sin, torch.bfloat16), want) and want.dtype == torch.bfloat16
    assert torch.equal(rope_ref(x.mT.contiguous().mT, position, cos, sin, torch.bfloat16), want)
    assert rope_ref(x.to(torch.bfloat16), position, cos, sin).dtype == torch.bfloat16
    for shape in ((0, 3, 5, 16), (2, 0, 5, 16), (2, 3, 0, 16)):
        assert rope_ref(torch.zeros(shape), torch.zeros(shape[:2], dtype=torch.int64), cos, sin).shape == shape


def test_a_position_outside_the_tables_is_nan_and_touches_no_other_token() -> None:
    x, position, cos, sin = operands()
    y = rope_ref(x, torch.tensor([[0, -1, 3], [32, 0, 2**40]]), cos, sin)
    assert torch.isnan(y).all(3).all(2).tolist() == [[False, True, False], [True, False, True]] and not torch.isnan(y[0, 2]).any()


@pytest.mark.parametrize("change, message", [
    (dict(position_BT=torch.zeros(2, 2, dtype=torch.int64)), "positions"), (dict(position_BT=torch.zeros(2, 3)), "int32 or int64"),
    (dict(x_BTHD=torch.zeros(2, 3, 16)), "need x"), (dict(x_BTHD=torch.zeros(2, 3, 5, 8)), "need x"),
    (dict(x_BTHD=torch.zeros(2, 3, 5, 16, dtype=torch.float64)), "float32, bfloat16"), (dict(cos_PD=torch.zeros(32, 8).half()), "float32 tables"),
    (dict(sin_PD=torch.zeros(31, 8)), "two tables"), (dict(cos_PD=torch.zeros(0, 8), sin_PD=torch.zeros(0, 8)), "at least one position"),
    (dict(out_dtype=torch.int32), "float32, bfloat16"),
])  # fmt: skip
def test_wrong_operands_are_named(change: dict, message: str) -> None:
    x, position, cos, sin = operands()
    with pytest.raises(ValueError, match=message):
        rope_ref(**{**dict(x_BTHD=x, position_BT=position, cos_PD=cos, sin_PD=sin), **change})

"""Claim: a cast to FP8 is the nearest number of the format, ties to the even code, saturating, on every torch version.

The oracle knows nothing of torch's casts: it decodes each 8-bit code by the formula of the OCP specification and takes the nearest by
comparing exact float64 distances. No tolerance: bits are compared. For NaN the sign is free, since the specification leaves it so.
"""

import numpy as np
import pytest
import torch

from kernels.exact.philox import philox_integers
from kernels.fp8.formats import BY_NAME, E4M3, E5M2, Format, cast

FORMATS = [E4M3, E5M2]
INF, NAN = float("inf"), float("nan")


def decode(code: int, fmt: Format) -> float:
    """The number of a non-negative code: exponent and mantissa fields, subnormal where the exponent field is 0."""
    exponent, mantissa = code >> fmt.mantissa_bits, code & ((1 << fmt.mantissa_bits) - 1)
    bias = 1 - fmt.min_exponent
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - fmt.mantissa_bits)
    return (1 + mantissa * 2.0**-fmt.mantissa_bits) * 2.0 ** (exponent - bias)


def finite_codes(fmt: Format) -> np.ndarray:
    """Values of codes 0, 1, ... up to the largest finite number: E4M3 has one NaN behind it, E5M2 an infinity and three."""
    return np.array([decode(code, fmt) for code in range(0x7F if fmt is E4M3 else 0x7C)])


def nearest(x: np.ndarray, fmt: Format) -> np.ndarray:
    """uint8 codes of float64 numbers that are not NaN."""
    values, a = finite_codes(fmt), np.minimum(np.abs(x), fmt.max)
    above = np.minimum(np.searchsorted(values, a), len(values) - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - a, a - values[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = np.where(a == 0, 0, code)
    return (code | (np.signbit(x) << 7)).astype(np.uint8)


def check(x: torch.Tensor, fmt: Format) -> None:
    q = cast(x, fmt)
    assert q.dtype == fmt.dtype and q.shape == x.shape
    got, nan = q.view(torch.uint8).numpy(), x.isnan().numpy()
    assert np.array_equal(q.float().isnan().numpy(), nan)
    assert np.array_equal(got[~nan], nearest(x.double().numpy()[~nan], fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_the_constants_of_a_format_are_those_of_its_codes(fmt: Format) -> None:
    values = finite_codes(fmt)
    assert values[-1] == fmt.max and values[1] == fmt.step and values[1 << fmt.mantissa_bits] == fmt.min_normal and BY_NAME[fmt.name] is fmt
    codes = torch.arange(len(values), dtype=torch.uint8).view(fmt.dtype)
    assert np.array_equal(codes.double().numpy(), values), "and torch decodes them alike"


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_every_bf16_number_is_cast_to_the_nearest(fmt: Format) -> None:
    check(torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float(), fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_halfway_cases_go_to_even_and_their_float32_neighbours_to_the_nearest(fmt: Format) -> None:
    values = finite_codes(fmt)
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    assert np.array_equal(middle.astype(np.float64), (values[1:] + values[:-1]) / 2), "a middle is a float32"
    x = np.concatenate([values.astype(np.float32), middle, np.nextafter(middle, np.float32(INF)), np.nextafter(middle, np.float32(0))])
    check(torch.from_numpy(np.concatenate([x, -x])), fmt)
    even = cast(torch.from_numpy(middle), fmt).view(torch.uint8)
    assert (even % 2 == 0).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_random_float32_bits_are_cast_to_the_nearest(fmt: Format) -> None:
    bits = philox_integers(1 << 16, 5).view(np.float32)
    near = (bits.view(np.uint32) & 0x83FFFFFF | 0x3C000000).view(np.float32)  # exponents where neither saturates nor underflows
    check(torch.from_numpy(np.concatenate([bits, near])), fmt)


@pytest.mark.parametrize("fmt, beyond", [(E4M3, [448.0, 449.0, 463.0, 464.0, 465.0, 480.0, 512.0]), (E5M2, [57344.0, 61439.0, 61440.0, 65535.0, 65536.0])])
def test_what_is_beyond_the_largest_number_becomes_it(fmt: Format, beyond: list[float]) -> None:
    for x in (*beyond, 3.0e38, INF):
        assert cast(torch.tensor([x, -x]), fmt).float().tolist() == [fmt.max, -fmt.max]
    assert cast(torch.tensor([NAN]), fmt).float().isnan().all()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_zeros_keep_their_sign_and_tiny_numbers_flush_to_them(fmt: Format) -> None:
    x = torch.tensor([0.0, 2.0**-149, fmt.step / 2, fmt.step / 2 * (1 + 2.0**-23), fmt.step])
    q = cast(torch.cat([x, -x]), fmt).view(torch.uint8)
    assert q.tolist() == [0, 0, 0, 1, 1, 0x80, 0x80, 0x80, 0x81, 0x81]


def test_a_cast_starts_from_float32() -> None:
    with pytest.raises(ValueError, match="starts from float32"):
        cast(torch.zeros(2, dtype=torch.bfloat16), E4M3)

"""The memory model counts what it says, grows as it must, and is corrected by measured peaks."""

import math
import pkgutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from studies.models.config import QWEN25_7B, LlamaConfig
from studies.plora import planning
from studies.plora.adapter import MODULES, PackShape, SlotShape
from studies.plora.planning.memory import GIB, Calibration, calibrate, largest_k, predict, rank_row_elements, site_sizes

SMOLLM2 = LlamaConfig(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, vocabulary=49152, context_tokens=8192, rope_base=1e5, rms_eps=1e-5)
# Published parameter counts: SmolLM2-135M (GGUF metadata) and Qwen2.5-7B (model card, 7.62 billion, to its three digits).
SMOLLM2_PARAMETERS, QWEN_PARAMETERS, QWEN_DIGITS = 134_515_008, 7.62e9, 0.005e9
SMOLLM2_RANK_ROW = 30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))  # q and o, k and v, the feed-forward part: inputs and outputs
ADAPTER_BYTES = 4 + 4 + 4 + 4 + 2  # master, gradient, two moments, bf16 copy
# Peaks drawn with 1% of noise: the least-squares estimate of a slope over 12 points spread evenly in (0, 1] errs by about
# 0.01 / sqrt(12 * var) with var = 1/12, so 0.01; four of those.
NOISE, SLOPE_ERROR = 0.01, 0.04
# Without noise: peaks are whole bytes of some 1e9, and the solver divides numbers of 1e-2 in double precision.
EXACT_SLOPE, EXACT_BYTES = 1e-6, 1e-4


def pack(k=4, rank=16, rows=1, tokens=128) -> PackShape:
    return PackShape(tokens=tokens, slots=(SlotShape(rank=rank, rows=rows),) * k)


def test_the_base_is_every_parameter_once():
    assert predict(SMOLLM2, pack()).base == 2 * SMOLLM2_PARAMETERS
    assert abs(predict(QWEN25_7B, pack(), element_bytes=4).base / 4 - QWEN_PARAMETERS) <= QWEN_DIGITS


def test_an_adapter_has_a_row_of_every_site_for_each_rank_in_four_fp32_numbers_and_a_copy():
    assert tuple(site_sizes(SMOLLM2)) == MODULES
    assert rank_row_elements(SMOLLM2) == SMOLLM2_RANK_ROW
    mixed = PackShape(tokens=64, slots=(SlotShape(rank=8), SlotShape(rank=64), SlotShape(rank=1)))
    assert predict(SMOLLM2, mixed).adapters == (8 + 64 + 1) * SMOLLM2_RANK_ROW * ADAPTER_BYTES


def test_activations_count_what_a_layer_keeps_by_hand():
    """One token, one layer: 4 hidden-sized, 2 q-sized, k, v, 3 intermediate, 7 rank rows as wide as the widest, in bf16, and a fp32 number a head."""
    one = replace(SMOLLM2, layers=1)
    shape = PackShape(tokens=1, slots=(SlotShape(rank=16), SlotShape(rank=128)))
    by_hand = 2 * (2 * (4 * 576 + 2 * 576 + 192 + 192 + 3 * 1536 + 7 * 128) + 4 * 9)
    assert predict(one, shape).activations == by_hand
    assert predict(SMOLLM2, shape).activations == 30 * by_hand


def test_only_answer_tokens_have_logits():
    of = lambda answers: predict(QWEN25_7B, pack(k=3, rows=2), answer_tokens=answers).logits  # noqa: E731
    assert of(0) == 0 and of(1) == 6 * 152_064 * 8 and of(None) == of(128) == 128 * of(1)


# every quantity that a bigger pack has more of
@pytest.mark.parametrize("more", [{"k": 5}, {"rank": 17}, {"rows": 2}, {"tokens": 129}])
def test_a_bigger_pack_needs_more(more):
    small, big = predict(SMOLLM2, pack()), predict(SMOLLM2, pack(**more))
    assert big.total > small.total and big.base == small.base
    assert big.total == sum(big.__dict__.values())


# limits from one that holds none to one of a card; ranks and lengths at which states or activations rule
@pytest.mark.parametrize("limit", [0.2, 4, 24, 141])
@pytest.mark.parametrize(("rank", "tokens"), [(8, 2048), (128, 64)])
def test_the_largest_k_fits_and_one_more_does_not(limit, rank, tokens):
    slot, limit_bytes = SlotShape(rank=rank, rows=2), round(limit * GIB)
    k = largest_k(SMOLLM2, slot, tokens=tokens, limit_bytes=limit_bytes, answer_tokens=1)
    need = lambda n: predict(SMOLLM2, PackShape(tokens=tokens, slots=(slot,) * n), answer_tokens=1).total  # noqa: E731
    assert need(k + 1) > limit_bytes and (k == 0 or need(k) <= limit_bytes)
    assert (k == 0) == (limit == 0.2)


@pytest.mark.parametrize("truth", [Calibration(activations=0.8, workspace_bytes=10**8), Calibration(activations=1.7, workspace_bytes=2 * 10**9)])
def test_a_calibration_is_found_from_noisy_peaks(truth):
    rng = np.random.default_rng(3)
    shapes = [pack(k=k, rows=rows, rank=16 * k, tokens=512) for k in (1, 2, 4, 8) for rows in (1, 2, 8)]
    peaks = [(s, round(predict(SMOLLM2, s, answer_tokens=1, calibration=truth).total * (1 + NOISE * rng.standard_normal()))) for s in shapes]
    found = calibrate(SMOLLM2, peaks, answer_tokens=1)
    assert abs(found.activations / truth.activations - 1) < SLOPE_ERROR
    exact = calibrate(SMOLLM2, [(s, predict(SMOLLM2, s, answer_tokens=1, calibration=truth).total) for s in shapes], answer_tokens=1)
    assert exact.activations == pytest.approx(truth.activations, rel=EXACT_SLOPE) and exact.workspace_bytes == pytest.approx(truth.workspace_bytes, rel=EXACT_BYTES)


def test_planning_loads_no_torch():
    """The command line plans with it."""
    modules = [f"studies.plora.planning.{m.name}" for m in pkgutil.iter_modules(planning.__path__)]
    assert len(modules) > 10
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at most as many answer tokens"):
        predict(SMOLLM2, pack(), answer_tokens=129)
    with pytest.raises(ValueError, match="2 or 4 bytes"):
        predict(SMOLLM2, pack(), element_bytes=1)
    with pytest.raises(ValueError, match="activations > 0"):
        Calibration(activations=math.nan)
    with pytest.raises(ValueError, match="at least 3 peaks"):
        calibrate(SMOLLM2, [(pack(), GIB)] * 5)

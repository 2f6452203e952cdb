"""On a GPU a sketch is that of the CPU, a probed step waits for nothing, and predictions hold against the kernels.

Run on a GPU host: python -m pytest tests/studies/test_loka_probe_gpu.py.
"""

import numpy as np
import pytest
import torch

from kernels.fp8.recipes import gemm
from studies.loka.measures.probing import validation
from studies.loka.probing.distributions import draw
from studies.loka.probing.probe import Probe
from studies.loka.probing.sketch import look, sketch
from studies.models.recommenders import MODELS, PUBLISHED
from suite.measure import Context

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Sums inside a row are float32 on a GPU: C 2^-24 of the row's sum of magnitudes; a row whose log2 lies that near to a bin's edge may fall into the next one.
SUM_RTOL, MOVED_ROWS = 2e-5, 2


@pytest.mark.parametrize("form", ["rows", "layers", "matrices"])
def test_a_sketch_on_a_gpu_is_that_on_a_cpu(form):
    x = draw("row-scaled", 1200, 96, seed=1).bfloat16()
    x = x if form == "rows" else x.view(100, 12, 96)
    cpu, gpu = (sketch(x.to(device), step=3, items=64, form=form).to_arrays() for device in ("cpu", "cuda"))
    for name, value in cpu.items():
        if name == "norms":
            assert int(np.abs(value - gpu[name]).sum()) <= 2 * MOVED_ROWS
        elif name in ("mean", "deviations", "log2_rms", "column_log2_amax", "column_squares"):
            np.testing.assert_allclose(gpu[name], value, rtol=SUM_RTOL, atol=SUM_RTOL, err_msg=name)
        else:
            np.testing.assert_array_equal(gpu[name], value, err_msg=name)


def test_looking_does_not_wait_for_the_device():
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    look(x, step=0)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the device
    start = torch.cuda.Event()
    look(x, step=1)
    start.record()
    assert not start.query()


def test_a_recommender_on_a_gpu_is_read_at_every_site():
    model = MODELS["wukong"](PUBLISHED["wukong"], "small", seed=1, device="cuda").to(torch.bfloat16)
    example = model.example(batch=64, seed=0, device="cuda", dtype=torch.bfloat16)
    watch = Probe(model, *example, every=2)
    for _ in range(3):
        watch(*example).float().square().mean().backward()
    readings = watch.readings
    assert set(readings.sites) == {s.name for s in watch.registry.sites} and all(r.dy.steps.tolist() == [0, 2] for r in readings.sites.values())


@pytest.mark.parametrize(("distribution", "bound"), [("gaussian", 0.6), ("row-scaled", 1.5)])  # as on a CPU: test_loka_probe_cells
def test_predictions_hold_against_the_kernels(distribution, bound):
    found = validation(Context(device="cuda", seed=1), distribution=distribution, m=1024, k=256, n=320)
    assert found.kind == "measured" and found.metrics["prediction_error_db"] <= bound
    assert gemm("rowwise").name in {r["recipe"] for r in found.records["recipes"]}

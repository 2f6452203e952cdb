"""Claim: an exact family's texts and logits on a GPU are those of its CPU oracle, bit for bit, however they are scheduled.

Run on a GPU host: python -m pytest tests/studies/test_decoder_gpu.py. Digests are compared, so there is no tolerance here.
"""

import pytest
import torch

from studies.models.config import LlamaConfig
from studies.models.decoder import Decoder, Sampling
from studies.models.families import FAMILIES
from studies.models.generation import Schedule, generate
from studies.models.prepared import prepare
from studies.models.synthetic import philox_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# SmolLM2's heads and sizes with fewer layers and tokens, and a Qwen2 with biases, wide heads and a head of its own
CONFIGS = {
    "smollm2": LlamaConfig(layers=3, hidden=576, intermediate=1536, heads=9, kv_heads=3, vocabulary=1024, context_tokens=256, rope_base=1e5, rms_eps=1e-5),
    "qwen2": LlamaConfig(layers=2, hidden=512, intermediate=1536, heads=4, kv_heads=2, vocabulary=1000, context_tokens=256, rope_base=1e6, rms_eps=1e-6,
                         qkv_bias=True, tied_head=False, head_size=128),
}  # fmt: skip
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9, 11] * 33, [3, 1, 4, 1, 5, 9, 2, 6], [17]]
NEW = 4
SAMPLING = Sampling(seed=7, temperature=0.8)
EXACT = [name for name, family in FAMILIES.items() if family.exact]


@pytest.fixture(scope="module", params=[(config, family) for config in CONFIGS for family in EXACT], ids="-".join)
def oracle(request):
    """(model on the GPU, digests of greedy texts, of sampled texts, both from the CPU)."""
    config, family = request.param
    weights = philox_weights(CONFIGS[config], seed=1)
    cpu = prepare(weights, family=family)
    greedy, sampled = (generate(cpu, PROMPTS, new_tokens=NEW, schedule=Schedule(batch=5), sampling=sampling).digests() for sampling in (None, SAMPLING))
    return prepare(weights, family=family, device="cuda"), greedy, sampled


# the axes of the CPU's test, with and without a graph, and a graph with rows that nobody uses
@pytest.mark.parametrize("schedule", [
    Schedule(), Schedule(batch=5), Schedule(batch=2, chunk=3), Schedule(batch=5, chunk=1), Schedule(batch=5, pad_to=70), Schedule(batch=5, cache=False),
    Schedule(graph=True), Schedule(batch=5, graph=True), Schedule(batch=3, chunk=16, pad_to=16, graph=True),
], ids=str)  # fmt: skip
def test_no_schedule_on_a_gpu_differs_from_the_oracle(oracle, schedule):
    model, greedy, sampled = oracle
    assert generate(model, PROMPTS, new_tokens=NEW, schedule=schedule).digests() == greedy
    assert generate(model, PROMPTS, new_tokens=NEW, schedule=schedule, sampling=SAMPLING).digests() == sampled


def test_a_replayed_step_reads_the_tokens_and_lengths_of_now(oracle):
    """The graph holds addresses, not values: other prompts, given tokens and a row taken back."""
    model = oracle[0]
    eager, graph = (Decoder(model, batch=3, capacity_tokens=80, graph=graph) for graph in (False, True))
    for prompts in (PROMPTS[:3], PROMPTS[3:], PROMPTS[1:4]):
        for decoder in (eager, graph):
            decoder.prefill(prompts)
        for _ in range(2):
            assert torch.equal(graph.step(), eager.step()) and torch.equal(graph.ids_B, eager.ids_B)
        given = list(range(20, 20 + len(prompts)))
        assert torch.equal(graph.step(given), eager.step(given))
        for decoder in (eager, graph):
            decoder.rewind([len(prompt) for prompt in prompts])
        assert torch.equal(graph.step(given), eager.step(given))


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.exact])
def test_a_captured_step_of_full_rows_is_the_step_without_a_mask(family):
    """What the timings run: all keys are seen, so the two may differ by the order of a sum only (bf16 attention: a rounding or two)."""
    model = prepare(philox_weights(CONFIGS["smollm2"], seed=1), family=family, device="cuda")
    plain, full = (Decoder(model, batch=2, capacity_tokens=32, graph=graph) for graph in (False, True))
    for decoder in (plain, full):
        decoder.prefill([[*range(31)], [*range(40, 71)]])
    full.capture(full=True)
    want, got = plain.step().clone(), full.step().clone()
    layers = CONFIGS["smollm2"].layers
    assert float((got - want).norm() / want.norm()) <= 2 * 20 * (layers + 1) ** 0.5 * 2.0**-9  # derived in test_decoder.py
    full.rewind([31, 31])
    assert torch.equal(full.step(), got), "a replay is the same function of the same state"

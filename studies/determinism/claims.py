"""What the study claims: a sentence, a target, our bar, and the finding that judges it (bits.py, speed.py).

    suite claims determinism --json
"""

from __future__ import annotations

import math
from functools import partial

from studies.determinism import bits, speed
from suite.claims import Claim

RUN, RUN_GPU = "make study-determinism", "make study-determinism PRESET=gpu"
_BITS = partial(Claim, target=1.0, bar=1.0, margin=0.0, unit="share", source="ours")
_TIME = partial(Claim, unit="x", smallest_n=5, command=RUN_GPU)

CLAIMS = (
    _BITS(id="bitwise_cpu_h200", statement="Every result of both exact families (operators on real weights, whole texts of SmolLM2 with all their logits) has the CPU oracle's bits, on the CPU and on "
          "the H200, at every batch, tile, chunk, padding and thread count.", test=bits.bitwise_cpu_h200, command=RUN),
    _BITS(id="golden_questions", statement="Every operator of a decoder and of its training answers every golden question with the manifest's bits, on a CPU and on the H200.", test=bits.golden_questions,
          command="python -m suite verify-determinism"),
    _BITS(id="training_step", statement="Three training steps (forward, backward, AdamW) give the same loss, gradients, parameters and moments on the CPU and on the H200.", test=bits.training_step, command=RUN_GPU),
    _BITS(id="static_audit", statement="What the compiler made of every kernel, for Ampere, Ada, Hopper, Blackwell and gfx942, keeps to IEEE operations in the stated order.", device="", test=bits.counted("audit"),
          command="make study-determinism PRESET=golden"),
    _BITS(id="foreign_code", statement="sm_80 and sm_89 code, run on the H200, gives the golden bits.", test=bits.counted("foreign"), command=RUN_GPU),
    _BITS(id="schedule_stress", statement="The golden bits hold on 8 to 128 SMs.", test=bits.counted("stress"), command=RUN_GPU),
    _BITS(id="engine_independence", statement="The integer family has one digest by wgmma, mma.sync, dp4a, FP64 tensor cores, cuBLAS and CPU BLAS.", test=bits.counted("engines"), command=RUN_GPU),
    Claim(id="bitwise_three_archs", statement="Linear layers give equal bits on Ampere, Ada and Hopper.", target=1.0, bar=None, margin=0.0, unit="share", device="", test=bits.three_archs,
          command="suite ingest BUNDLES-OF-OTHER-CARDS", source="the paper's abstract"),
    Claim(id="weight_bytes", statement="Decode moves this many bytes a weight, by the profiler.", target=2.05, bar=2.05, direction="lower", margin=0.0, unit="B", test=speed.weight_bytes, command=RUN_GPU,
          source="the paper's abstract: half the weight traffic of fp32 storage"),
    _TIME(id="decode_vs_layercast", statement="Decode of 1 to 8 tokens is faster than LayerCast as its authors run it (weights upcast in memory at each call).", target=5.0, bar=5.0, test=speed.decode_vs_layercast,
          source="ours; floor 10 bytes a weight against 2"),
    _TIME(id="decode_vs_fp32_stored", statement="Decode of one token is faster than SGEMM on weights stored in fp32.", target=1.9, bar=1.9, test=speed.decode_vs_fp32_stored, source="ours; floor 4 bytes a weight against 2"),
    _TIME(id="decode_vs_compiled", statement="Decode of one token keeps up with LayerCast compiled by torch, whose order is its own.", target=1.0, bar=1.0, test=speed.decode_vs_compiled,
          source="ours"),
    _TIME(id="decode_bandwidth", statement="Decode of one token, 14336x4096, reads weights at this share of the copy bandwidth.", target=0.85, bar=0.85, unit="share", test=speed.decode_bandwidth, source="ours"),
    _TIME(id="decode_vs_bf16", statement="Decode of 1 to 8 tokens keeps up with the fastest of cuBLAS in bf16, cuBLAS padded to 16 rows and, where it was timed beside it, what torch compiles.", target=0.95, bar=0.95, test=speed.decode_vs_bf16, source="ours"),
    _TIME(id="prefill_fma_vs_sgemm", statement="Prefill of the fma family at 4096^3 keeps up with fp32 SGEMM.", target=1.0, bar=0.9, test=speed.prefill_fma_vs_sgemm, source="the paper's abstract: about 1x of its range"),
    _TIME(id="prefill_integer_vs_sgemm", statement="Prefill of the integer family (b6) at 4096^3, slicing included, is faster than fp32 SGEMM.", target=3.3, bar=3.3, test=speed.prefill_integer_vs_sgemm, source="ours"),
    _TIME(id="prefill_b9_vs_sgemm", statement="The same with all nine digit products (b9).", target=2.0, bar=2.0, test=speed.prefill_b9_vs_sgemm, source="ours"),
    _TIME(id="decode_end_to_end", statement="A 7B-shaped decoder, batch 1 and 8, decodes faster than with LayerCast as written.", target=1.17, bar=4.0, test=speed.decode_end_to_end,
          source="the paper's abstract: 1.17x to 3.1x over the state of the art"),
    _TIME(id="decode_end_to_end_stored", statement="The same against weights stored in fp32 (at most 2x by bytes).", target=1.17, bar=None, test=speed.decode_end_to_end_stored, source="the paper's abstract: 1.17x to 3.1x"),
    _TIME(id="prefill_end_to_end", statement="A 7B-shaped decoder prefills 2048 tokens and more faster than with LayerCast.", target=1.17, bar=2.5, test=speed.prefill_end_to_end,
          source="the paper's abstract: 1.17x to 3.1x"),
    _TIME(id="exactness_cost", statement="Exact decode of the 7B-shaped decoder, batch 1 and 8, costs at most this share of time over bf16 serving.", target=0.34, bar=0.10, direction="lower", margin=0.0, unit="share",
          test=speed.exactness_cost, source="SGLang's deterministic mode: 34%"),
)
assert all(math.isfinite(c.target) for c in CLAIMS if c.target is not None), "a target is a finite number"

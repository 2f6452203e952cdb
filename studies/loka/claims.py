"""What the study claims: a sentence, a target, our bar, and the finding that judges it (findings.py).

    suite claims loka --json
"""

from __future__ import annotations

import math
from functools import partial

from studies.loka.report import findings, findings_loss, findings_probe, findings_speed
from suite.claims import Claim

RUN, RUN_GPU = "make study-loka", "make study-loka PRESET=gpu"
PAPER = "LoKA, arXiv 2605.10886, read second-hand"
_ALL = partial(Claim, target=1.0, bar=1.0, margin=0.0, unit="share", source="ours", device="", command=RUN)
_TIME = partial(Claim, unit="x", smallest_n=5, command=RUN_GPU)
_LOSS = partial(Claim, margin=0.0, unit="relative", direction="lower", smallest_n=5, command=RUN_GPU)
_PRICE = partial(Claim, target=None, margin=0.0, device="", smallest_n=40, source="ours", command=RUN)
_PROBE = partial(Claim, target=None, margin=0.0, device="", source="ours", command=RUN)

CLAIMS = (
    _ALL(id="row_scales_break_tensorwise", statement="Where the rows of an activation differ in scale, FP8 with one scale a tensor is unsafe at every inner site of the models, forward; with one scale a row none is.",
         test=findings.row_scales_break_tensorwise),
    _ALL(id="head_stays_bf16", statement="No FP8 recipe reaches the logit's 32 dB at a model's last layer, under any distribution.", test=findings.head_stays_bf16),
    _ALL(id="rowwise_safe_for_real", statement="In models trained here every inner forward product is safe with one scale a row.", test=findings.rowwise_safe_for_real),
    Claim(id="torchao_filter_blind", statement="torchao's automatic filter converts none of the eight nn.Linear of MLPerf's DLRM-v2, in either recipe.", target=0.0, bar=0.0, margin=0.0, unit="layers", direction="lower",
          device="", test=findings.torchao_filter, source="ours; the filter's thresholds", command=RUN),
    Claim(id="hardware_matches_emulation", statement="The H200's FP8 products agree with the emulation that the CPU's numbers come from, in the worst row.", target=45.0, bar=45.0, margin=0.0, unit="dB",
          test=findings.hardware_matches, source="ours; 14 bits of Hopper's accumulator at 4096 terms", command=RUN_GPU),
    _PROBE(id="probe_prediction_error_db", statement="From one sketch the probe predicts the 1st percentile of rows of every recipe, forward and dgrad, to a decibel, whatever the distribution.", bar=1.0, unit="dB", direction="lower",
           test=findings_probe.probe_prediction_error_db),
    _PROBE(id="gaussian_probe_hides_rows", statement="Where rows differ in scale a Gaussian probe puts the worst rows' SQNR too high, by this much.", bar=10.0, unit="dB", test=findings_probe.gaussian_probe_hides_rows),
    _PROBE(id="mere_unstable", statement="The mean elementwise relative error of one ordinary Gaussian product differs between seeds by this factor.", bar=1.2, unit="x", test=findings_probe.mere_unstable),
    _PROBE(id="stops_rightly", statement="Stopping as soon as the interval is clear gives a wrong verdict in at most 5% of streams.", bar=0.05, unit="share", direction="lower", test=findings_probe.stops_rightly),
    Claim(id="probe_overhead", statement="The probe, every 100 steps on all sites, activations, weights and gradients of Wukong-5.6, adds at most this share of a run's time.", target=0.01, bar=0.005, margin=0.0, unit="share",
          direction="lower", smallest_n=5, test=findings_probe.probe_overhead, source=PAPER, command=RUN_GPU),
    _PRICE(id="loss_prediction", statement="The price of a product in log-loss ranks single products in FP8 as their measured changes do (rank correlation).", bar=0.9, test=findings_loss.loss_prediction),
    _PRICE(id="loss_prediction_slope", statement="Measured changes grow with predicted ones: the slope on log-log, or its inverse, is at most 2.", bar=2.0, direction="lower", unit="x", test=findings_loss.loss_prediction_slope),
    _PRICE(id="price_beats_noise", statement="The price ranks better than noise over signal at the product alone (difference of rank correlations).", bar=0.0, test=findings_loss.price_beats_noise),
    _LOSS(id="quality_tost", statement="Wukong-0.53 trained by our plan has the log-loss of bf16 within 0.02%.", target=2e-4, bar=2e-4, test=findings_loss.quality_tost, source=PAPER),
    _LOSS(id="quality_small", statement="The same for a small Wukong, emulated or measured.", target=2e-4, bar=2e-4, test=findings_loss.quality_small, device="", source="ours", command=RUN),
    _LOSS(id="real_log_change", statement="On MovieLens-1M rowwise FP8 in every inner forward product of a trained Wukong leaves the log-loss within 0.02%.", target=2e-4, bar=2e-4, test=findings_loss.real_log_change,
          device="", source="ours", command="SUITE_DATA=FOLDER make study-loka PRESET=gpu"),
    _LOSS(id="mods_quality", statement="The three Mods together leave the log-loss as it was, within 0.02%.", target=2e-4, bar=None, test=findings_loss.mods_quality, source=PAPER),
    Claim(id="naive_fp8_loss", statement="Tensorwise FP8 at every product makes the log-loss 2.5% worse.", target=0.025, bar=None, unit="relative", smallest_n=5, test=findings_loss.naive_fp8_loss,
          source=PAPER, command=RUN_GPU),
    _TIME(id="naive_fp8_speed", statement="torchao's FP8 on every linear layer of Wukong-5.6 makes a step 1.3x slower (one GPU, without FSDP).", target=1.3, bar=None, test=findings_speed.naive_fp8_speed, source=PAPER),
    _TIME(id="dispatch_vs_bf16", statement="Wukong-5.6 as published, B = 6144: forward and backward of the dense part by a dispatched plan over bf16, both compiled, weights quantised in every step.", target=1.12, bar=1.25,
          test=findings_speed.dispatch_vs_bf16, source=PAPER),
    _TIME(id="dispatch_vs_single", statement="The same plan over the fastest single recipe.", target=1.12 / 1.08, bar=1.03, test=findings_speed.dispatch_vs_single, source=f"{PAPER}: 1.12x and 1.08x"),
    _TIME(id="training_speedup", statement="Wukong-5.6 with the Mods: a training step of the dense part with fusion over compiled bf16 with the same Mods.", target=1.19, bar=1.25, test=findings_speed.training_speedup,
          source=f"{PAPER}; embeddings, optimizer and communication inside"),
    _TIME(id="inference_speedup", statement="The same for inference.", target=1.4, bar=1.4, test=findings_speed.inference_speedup, source=PAPER),
    _TIME(id="of_amdahl_cap", statement="Both reach this share of the cap that their products' own times set.", target=0.85, bar=0.85, unit="share", test=findings_speed.of_amdahl, source="ours"),
    _TIME(id="mods_latency", statement="A layer of Wukong-5.6 with the three Mods over the published one, bf16, compiled.", target=2.0, bar=2.0, test=findings_speed.mods_latency, source=PAPER),
    _TIME(id="fused_quantise_bandwidth", statement="Norm, activation and quantising in one kernel move their 3 bytes a number at this share of copy bandwidth.", target=0.85, bar=0.85, unit="share",
          test=findings_speed.fused_quantise_bandwidth, source="ours"),
    Claim(id="crossover_map", statement="FP8 over bf16 on the H200 is known for every shape of the map.", target=1.0, bar=1.0, margin=0.0, unit="share", test=findings_speed.crossover_map, source="ours", command=RUN_GPU),
)  # fmt: skip
assert all(math.isfinite(c.target) for c in CLAIMS if c.target is not None), "a target is a finite number"

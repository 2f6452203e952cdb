"""A determinism report of plausible size and shape for the tests to render. The numbers are made up.

    from sample import sample_report
    report = sample_report()

It is no result: nothing in it was measured.
"""

from reports import (
    ClaimLedger, ClaimRow, Column, Group, Heading, Interval, KeyFact, KeyFacts, Matrix, MatrixCell, Missing,
    NOT_MEASURED_HERE, OtherReading, Prose, Provenance, Report, Table,
)
from reports.figures import Ratio, Series, Source, bar_ratio, claims_plot, line_curves

COMMIT = "3f9c1d7a5e20b8c4d6f1a2b3c4d5e6f708192a3b"
RUNS = tuple(f"{i:02x}7d4e9ab1c84f0f9a2be6d3c5f7a8{i:02d}" for i in range(6))
H200 = Source(run_ids=RUNS, commit=COMMIT, kind="measured", machine="NVIDIA H200")

ROWS = ("fma (family A)", "integer b6 (family B)", "integer b9 (family B)", "batch_invariant_ops", "LayerCast, FP32 stored",
        "cuBLAS fp32", "cuBLAS bf16", "TF32")
COLUMNS = ("batch 1", "batch 8", "batch 64", "chunked prefill", "33 SMs", "2 GPUs, TP=2", "AVX-512, 2 cores", "AArch64")


def matrix(rows: tuple[str, ...] = ROWS, columns: tuple[str, ...] = COLUMNS) -> Matrix:
    """Exact families equal everywhere, batch-invariant peers in their own columns, library kernels differ."""
    equal, hole = MatrixCell(state="equal", text="384/384"), MatrixCell(state="not_measured", detail="no such machine here")
    unclaimed = MatrixCell(state="not_claimed")
    cells = [[equal] * 7 + [hole] for _ in range(3)]
    cells.append([equal, equal, equal, MatrixCell(state="partial", text="379/384", detail="max 2 ULP, first at attention")]
                 + [unclaimed] * 3 + [hole])
    cells.append([equal, equal, MatrixCell(state="partial", text="371/384", detail="max 1 ULP, first at lm_head")]
                 + [unclaimed] * 4 + [hole])
    cells.append([equal] + [MatrixCell(state="differs", text=f"{12 + i} ULP", detail="first at layer 0 q_proj")
                            for i in range(5)] + [unclaimed, hole])
    cells += [[equal] + [MatrixCell(state="differs", text=f"{220 + 31 * i} ULP", detail="first at layer 0 q_proj")
                         for i in range(5)] + [unclaimed, hole] for _ in range(2)]
    return Matrix(
        caption="Outputs of each implementation against the CPU oracle, for every operator and 50 greedy generations.",
        row_labels=rows, column_labels=columns, cells=cells, run_ids=RUNS, commit=COMMIT,
        column_kinds=["measured"] * 7 + [""],
        row_groups=[Group(label="Exact by construction", size=3), Group(label="Batch-invariant peers", size=2),
                    Group(label="Negative controls", size=3)],
        column_groups=[Group(label="NVIDIA H200", size=6), Group(label="CPU", size=2)],
        note="A cell counts operators whose output bytes are equal.")


def _claim(id: str, statement: str, verdict: str, **fields: object) -> ClaimRow:
    given = {"kind": "measured", "machine": "NVIDIA H200", "commit": COMMIT, "n": 5} if verdict != "NOT MEASURED HERE" else {}
    return ClaimRow(study="determinism", id=id, statement=statement, verdict=verdict,
                    command=f"python -m suite claims determinism --only {id}", **(given | fields))


def ledger() -> ClaimLedger:
    """Every verdict, with and without bar, target and interval; one stale row, one read on a second machine."""
    cpu = OtherReading(machine="2-core x86-64 CPU", verdict="UNDECIDED", kind="measured", value=1.7, low=0.9, high=3.1, n=5)
    return ClaimLedger(rows=[
        _claim("bitwise_cpu_h200", "All cells of the checked-in manifest are bitwise equal on CPU and H200, whole model "
               "included", "REPRODUCED", target=1.0, bar=1.0, bar_met=True, value=1.0, low=1.0, high=1.0, n=384),
        _claim("bitwise_three_archs", "Linear-layer outputs are bitwise equal across Ampere, Ada and Hopper",
               "NOT MEASURED HERE", target="linears, three architectures"),
        _claim("weight_bytes", "Weight bytes moved per weight in decode, by the profiler", "EXCEEDED", target=5.0, bar=2.05,
               bar_met=True, value=2.011, low=2.008, high=2.016, unit="B", direction="lower"),
        _claim("decode_vs_layercast", "Smallest ratio to LayerCast as written, M in {1, 2, 4, 8}", "EXCEEDED", target=3.1, bar=5,
               bar_met=True, value=5.12, low=4.98, high=5.27, unit="×", others=[cpu]),
        _claim("decode_bandwidth", "Share of copy bandwidth at M = 1, at least 100 MB of weights", "REPRODUCED", target=0.8,
               bar=0.85, bar_met=False, value=0.822, low=0.811, high=0.834),
        _claim("prefill_fma_vs_sgemm", "Family A against SGEMM at 4096³", "NOT REPRODUCED", target=1.0, bar=0.9, bar_met=False,
               value=0.781, low=0.774, high=0.789, unit="×"),
        _claim("prefill_integer_vs_sgemm", "b6 against SGEMM at 4096³, activation slicing in the timed region", "UNDECIDED",
               target=3.3, bar=3.3, value=3.34, low=3.21, high=3.48, unit="×", stale=True),
        _claim("exactness_cost", "Cost of exactness against bf16 kernels, 7B-shaped decode, batch up to 8", "UNDECIDED",
               target=0.34, bar=0.1, bar_met=None, direction="lower", n=2),
    ])


def timings() -> Table:
    """A timing table: numbers with intervals, a missing one with its reason, a kind per row."""
    columns = [Column(name="Implementation"), Column(name="M", align="right"), Column(name="N × K"),
               Column(name="Time", unit="µs", align="right"), Column(name="Bandwidth", unit="TB/s", align="right"),
               Column(name="Ratio to LayerCast", unit="×", align="right")]
    rows, kinds = [], []
    for i, m in enumerate((1, 2, 4, 8)):
        rows += [["fma (family A)", m, "4096 × 4096", Interval(value=9.8 + i, low=9.7 + i, high=9.95 + i), 3.42,
                  Interval(value=5.12 - 0.1 * i, low=4.98 - 0.1 * i, high=5.27 - 0.1 * i)],
                 ["LayerCast as written", m, "4096 × 4096", Interval(value=50.3 + i, low=50.1 + i, high=50.6 + i), 3.31,
                  Missing("reference")],
                 ["fma on sm_89 code", m, "4096 × 4096", NOT_MEASURED_HERE, Missing("no time"), Missing("no time")]]
        kinds += ["measured", "measured", "emulated"]
    return Table(caption="Decode, one linear layer; medians of interleaved graph replays.", columns=columns, rows=rows,
                 kinds=kinds, machine="NVIDIA H200", note="Weights rotated over three times the L2 cache. n = 5 processes.")


def curves():
    xs = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    series = [Series(label=label, x=xs, y=[Interval(value=v, low=v * 0.95, high=v * 1.06) for v in
                                           (top / (1 + (x / knee)) + 0.9 for x in xs)])
              for label, top, knee in (("against LayerCast as written", 4.2, 60), ("against LayerCast, FP32 stored", 1.3, 90),
                                       ("against LayerCast, compiled", 0.35, 200))]
    return line_curves(caption="Speed-up of the fma family over three readings of LayerCast, by tokens per step M.",
                       alt="Speed-up falls from 5.1 at M = 1 to 1.7 at M = 256.", series=series, x_label="M (tokens per step)",
                       y_label="speed-up", y_unit="×", source=H200, reference=(1.0, "equal speed"))


def sample_report() -> Report:
    """The whole report."""
    claims = ledger()
    ratios = [Ratio(label=label, interval=Interval(value=v, low=v * 0.97, high=v * 1.03)) for label, v in
              (("decode, batch 1, 7B-shaped", 4.31), ("decode, batch 8, 7B-shaped", 3.87), ("prefill, 2048 tokens", 2.66),
               ("prefill, 512 tokens, chunked and padded to the tile", 1.42), ("training step, SmolLM2-135M", 0.83))]
    return Report(
        title="Bitwise determinism across devices", subtitle="One reduction order on CPU and GPU: what it guarantees, what it costs",
        generated_from="9e107d9d372bb6826bd81d3542a419d6a8f5b2c3d4e5f60718293a4b5c6d7e8f", commit=COMMIT,
        blocks=[
            KeyFacts(items=[
                KeyFact(label="Measured", value="384 operator cells and 50 greedy generations", detail="preset gpu"),
                KeyFact(label="Machines", value="NVIDIA H200; 2-core x86-64 CPU", detail="driver 570.86, torch 2.11.0, triton 3.6.0"),
                KeyFact(label="Kinds", value="412 measured, 24 emulated, 8 not measured here"),
                KeyFact(label="Not shown", value="Nothing on Ampere or Ada was executed; their code was audited only")]),
            Heading(level=2, text="Result"),
            Prose(text="Both exact families give **the same bytes** on the H200 and on the CPU in every schedule tried. The "
                       "negative controls differ as soon as the batch changes, so the test can fail. Family A runs at 0.78 of "
                       "`SGEMM` speed at 4096³, short of our bar.\n\nA verdict compares the interval with the target. Equality "
                       "needs every planned cell; a missing cell is never filled in."),
            matrix(),
            Heading(level=2, text="Claims"), claims,
            claims_plot(claims, caption="How far each measured claim got: 1 is our bar.", run_ids=RUNS, commit=COMMIT),
            Heading(level=2, text="Speed"), Heading(level=3, text="Decode"), timings(), curves(),
            Heading(level=3, text="End to end"),
            bar_ratio(caption="Whole decoder against LayerCast as written.", alt="Five ratios from 0.83 to 4.31.", ratios=ratios,
                      x_label="speed-up", source=H200),
            Heading(level=2, text="Provenance"),
            Provenance(commands=["make study-determinism", "python -m suite verify reports/published/determinism"],
                       machines=[("gpu", "NVIDIA H200, driver 570.86"), ("cpu", "x86-64, 2 cores, AVX-512")],
                       packages=[("torch", "2.11.0"), ("triton", "3.6.0"), ("numpy", "2.3.5")]),
        ])

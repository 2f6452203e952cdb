"""What torchao's automatic filter makes of recommenders: which of their products it would convert, by their sizes alone.

    torchao_filter(ctx, models=[["dlrm_v2", "mlperf"]])

It sees `nn.Linear` modules. MLPerf's DLRM-v2 has eight, its bottom and over MLPs; the six products of its cross network read raw parameters
(torchrec/modules/crossnet.py), so the real package cannot see them, though our model writes them as layers. Products of two activations are never seen.
A count of shapes: nothing is computed in FP8, and no batch or device plays a part.
"""

from __future__ import annotations

from studies.loka.pricing.rules import converts
from studies.loka.sites.model_sites import model_sites
from suite.measure import Context, Result

__all__ = ["torchao_filter"]

HIDDEN = {"dlrm_v2": "cross."}  # sites of the published code that are no nn.Linear there


def torchao_filter(ctx: Context, *, models: list[list[str]]) -> Result:
    """Record "filter": for each model its products, those that torchao can see, and those that its filter converts in either recipe; shares of FLOPs."""
    records = []
    for model, size in models:
        sites = model_sites(model, size, 1)
        seen = [s for s in sites if s.op == "linear" and not (model in HIDDEN and s.name.startswith(HIDDEN[model]))]
        taken = {recipe: [s for s in seen if converts(s.n, s.k, recipe)] for recipe in ("tensorwise", "rowwise")}
        flops = sum(s.gemm("forward").flops for s in sites)
        share = {recipe: sum(s.gemm("forward").flops for s in found) / flops for recipe, found in taken.items()}
        records.append({"model": f"{model} {size}", "products": len(sites), "seen": len(seen), "converted": {r: len(f) for r, f in taken.items()}, "flops_share": share})
    return Result(records={"filter": records})

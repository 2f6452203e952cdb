"""Measure functions of the flip study: where do an implementation's tokens change with the batch, and how close was the choice?

    texts(ctx, impl="bf16", batch=8, prompts=128, new_tokens=96)        # greedy texts on GSM8K questions
    labels(ctx, impl="bf16", batch=16, sentences=872)                   # SST-2 by the two labels' logits

`texts` keeps each step's token, the gap between the two highest logits (in nats) and the probability of the highest; comparing two
batches gives Div_Index (the first token that differs), the gap at the flip and Avg_Std@top1_prob; `labels` gives Std@Acc over batches
(metrics of arXiv 2506.09501). Prompts are padded on neither side and finished texts run on, so that batches differ in size alone.
"""

from __future__ import annotations

import numpy as np
import torch

from studies.models.decoder import Decoder
from studies.models.llama import load_smollm2
from studies.models.prepared import prepare
from suite.assets import chat_text, load, load_tokenizer, prompts as asset_prompts
from suite.measure import Context, Result

QUESTION = "Movie review: {}\nThe sentiment of this review (positive or negative) is"
ANSWERS = (" negative", " positive")


def texts(ctx: Context, *, impl: str, batch: int, prompts: int, new_tokens: int) -> Result:
    """Arrays tokens int32, gap fp32, top1 fp32, each [prompts, new_tokens]; steps from the end-of-turn token on count as ended (`ends`)."""
    tokenizer = load_tokenizer()
    ids = [tokenizer.encode(chat_text(text)) for text in asset_prompts(prompts, source="gsm8k").texts]
    model = prepare(load_smollm2(), family=impl, device=ctx.device)
    decoder = Decoder(model, batch=min(batch, prompts), capacity_tokens=max(map(len, ids)) + new_tokens, graph=ctx.device.startswith("cuda"))
    found = [_written(decoder, ids[first : first + batch], new_tokens) for first in range(0, prompts, batch)]
    tokens, gap, top1 = (np.concatenate(part) for part in zip(*found, strict=True))
    end = tokenizer.encode("<|im_end|>")[0]
    ends = np.where((tokens == end).any(1), (tokens == end).argmax(1) + 1, new_tokens)
    return Result(arrays={"tokens": tokens, "gap": gap, "top1": top1, "ends": ends.astype(np.int32)}, metrics={"tokens": float(ends.sum())})


def _written(decoder: Decoder, ids: list[list[int]], new_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One batch, to the end; nothing is read back before it."""
    rows, device = len(ids), decoder.model.device
    tokens = torch.empty((new_tokens, rows), dtype=torch.int64, device=device)
    gap, top1 = torch.empty((new_tokens, rows), device=device), torch.empty((new_tokens, rows), device=device)
    for step in range(new_tokens):
        logits_RV = decoder.prefill(ids) if step == 0 else decoder.step()
        best = logits_RV.float().topk(2, dim=1).values
        tokens[step] = decoder.ids_B[:rows]
        gap[step], top1[step] = best[:, 0] - best[:, 1], torch.exp(best[:, 0] - logits_RV.float().logsumexp(1))
    return tokens.T.to(torch.int32).cpu().numpy(), gap.T.cpu().numpy(), top1.T.cpu().numpy()


def labels(ctx: Context, *, impl: str, batch: int, sentences: int) -> Result:
    """Array margin fp32 [sentences] (logit of positive minus negative) and the accuracy of its sign."""
    tokenizer, rows = load_tokenizer(), load("sst2-dev")[:sentences]
    ids = [tokenizer.encode(QUESTION.format(text)) for text, _ in rows]
    negative, positive = (tokenizer.encode(word)[0] for word in ANSWERS)
    model = prepare(load_smollm2(), family=impl, device=ctx.device)
    decoder = Decoder(model, batch=min(batch, len(ids)), capacity_tokens=max(map(len, ids)))
    margin = torch.cat([_margin(decoder.prefill(ids[first : first + batch]), positive, negative) for first in range(0, len(ids), batch)]).cpu().numpy()
    right = (margin > 0) == np.array([label == 1 for _, label in rows])
    return Result(arrays={"margin": margin}, metrics={"accuracy": float(right.mean())})


def _margin(logits_RV: torch.Tensor, positive: int, negative: int) -> torch.Tensor:
    return logits_RV[:, positive].float() - logits_RV[:, negative].float()

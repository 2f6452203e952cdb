"""All live adapters on the same rows, in one packed pass after another.

    judge = Judge(base, adapters, ops, task.validation, scales=seg.scales, graphed=True)
    judge.looks({0: 4096, 2: 512})                # slot -> tokens seen of the live ones; to slot -> Evaluation

Every slot reads the same rows at a time, as many as `TOKENS_A_SLOT` tokens hold: a number that no neighbour changes. Sequences are as long as the
longest row of the part, not as the pack's. There is no dropout and no gradient. An adapter whose loss is not finite has no score (NaN).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kernels.lora.segments import Segments
from studies.plora.adapter import Evaluation
from studies.plora.data.task import Examples
from studies.plora.engine.base import Base
from studies.plora.engine.decoder import answer_rows, hidden
from studies.plora.engine.graph import Runner
from studies.plora.engine.operators import Frame, Operators
from studies.plora.engine.rows import rows_of
from studies.plora.engine.sites import Adapters

__all__ = ["TOKENS_A_SLOT", "Judge"]

TOKENS_A_SLOT = 1024


class Judge:
    """scales: of the pack's segments, shared, so that an admitted adapter is judged under its own."""

    def __init__(self, base: Base, adapters: Adapters, ops: Operators, examples: Examples, *, scales: torch.Tensor, graphed: bool) -> None:
        device, slots = base.device, len(adapters.state.ranks)
        tokens = int(examples.lengths.max())
        self.base, self.adapters, self.ops, self.examples = base, adapters, ops, examples
        self.rows = rows_of(examples, tokens=tokens, device=device)
        self.each = max(1, min(len(examples), TOKENS_A_SLOT // tokens))  # rows a slot and pass
        seg = Segments.of(rows=[self.each * tokens] * slots, ranks=adapters.state.ranks, scales=[0.0] * slots, device=device)
        self.frame = Frame.of(base.config, replace(seg, scales=scales), tokens)
        self.choices_C = None if examples.choices is None else torch.from_numpy(examples.choices).long().to(device)
        self.index_R = torch.full((self.each,), self.rows.idle, dtype=torch.int64, device=device)
        count = slots * self.each * self.rows.answers
        self.loss_A = torch.zeros(count, dtype=torch.float32, device=device)
        self.chosen_A = torch.zeros(count, dtype=torch.int64, device=device)
        self._runner = Runner(self._pass, device=device, graphed=graphed)

    @torch.no_grad()
    def _pass(self) -> None:
        slots = len(self.adapters.state.ranks)
        index_B = self.index_R.repeat(slots)
        h = hidden(self.base, self.adapters.factors, self.ops, self.rows.ids_NT[index_B], self.rows.lengths_N[index_B], self.frame)
        bounds = self.frame.answer_bounds(self.rows.answers)
        _, x = self.ops.add_norm(answer_rows(h, self.rows.places_NA[index_B]), None, self.base.norm_K, self.base.config.rms_eps, bounds)
        loss_A, _, chosen_A = self.ops.answers(x, self.base.head_VK, self.rows.targets_NA[index_B].flatten(), bounds, learn=False, choices_C=self.choices_C)
        self.loss_A.copy_(loss_A)
        if chosen_A is not None:
            self.chosen_A.copy_(chosen_A)

    def prepare(self) -> None:
        """Capture the pass, where it is to be replayed and was not yet."""
        if not self._runner.ready:
            self.index_R.fill_(self.rows.idle)
            self._runner.prepare()

    def looks(self, seen: dict[int, int]) -> dict[int, Evaluation]:
        """slot -> tokens seen of those that are live, to what they are worth."""
        n, slots, answers = len(self.examples), len(self.adapters.state.ranks), self.rows.answers
        losses, chosen = [], []
        for start in range(0, n, self.each):
            index = torch.arange(start, start + self.each).clamp(max=self.rows.idle)
            self.index_R.copy_(index)
            self._runner()
            losses.append(self.loss_A.view(slots, self.each, answers).clone())
            chosen.append(self.chosen_A.view(slots, self.each, answers)[:, :, 0].clone())
        loss_S = torch.cat(losses, dim=1)[:, :n].double().cpu().numpy().sum(axis=(1, 2)) / int(self.examples.answer_tokens.sum())
        if self.choices_C is None:
            score_S = -loss_S
        else:
            right_S = (torch.cat(chosen, dim=1)[:, :n].cpu().numpy() == self.examples.labels).mean(axis=1)
            score_S = np.where(np.isfinite(loss_S), right_S, np.nan)  # the argmax over NaN is some class, too
        return {slot: Evaluation(tokens_seen=tokens, score=float(score_S[slot]), loss=float(loss_S[slot])) for slot, tokens in seen.items()}

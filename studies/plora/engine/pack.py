"""EnginePack: many adapters train on one frozen base, each as if it were alone.

    pack = EnginePack(base, PackShape(tokens=128, slots=(SlotShape(rank=16), SlotShape(rank=64, rows=2))), task)
    pack.admit(0, AdapterConfig(rank=16, alpha=32.0, learning_rate=2e-4, batch=4, budget_tokens=100_000))
    while not pack.live()[0].done:
        pack.advance(64)
    looks, seconds = pack.evaluate()
    weights = pack.release(0)                                    # float32 arrays by PEFT's names; export_adapter writes them

A micro-step passes each slot's rows; an adapter whose batch is full takes its optimizer step (its own rate, decay, clip), the others go on
adding. What passes when is planned on the host (`courses`), what is computed stands in `decoder`; a GPU replays two CUDA graphs, one of the
micro-step and one of the optimizer step, whatever is admitted or released. On the CPU everything is eager, in float32, slot by slot.

What an adapter becomes depends on its configuration, the base, the task and its slot's shape (rank capacity, rows, tokens), never on its
neighbours: not at all on the CPU, and not by one bit on a GPU with deterministic=True (fixed tiles in the base's products too, which costs time).
Otherwise a GPU's library may choose other tiles for more rows, so bits may differ within roundings; a neighbour's NaN still cannot reach it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kernels.lora.optimizer import adamw_step, adamw_step_ref
from kernels.lora.segments import Segments
from studies.plora.adapter import AdapterConfig, Evaluation, PackShape, Progress
from studies.plora.data.task import Task
from studies.plora.engine import checkpoint
from studies.plora.engine.base import Base
from studies.plora.engine.courses import Course, Plan, plan_steps
from studies.plora.engine.decoder import answer_rows, hidden
from studies.plora.engine.evaluation import Judge
from studies.plora.engine.graph import Runner
from studies.plora.engine.operators import Frame, operators_for
from studies.plora.engine.rows import rows_of
from studies.plora.engine.sites import Adapters
from studies.plora.planning.memory import predict

__all__ = ["EnginePack"]

_PLANNED = 8  # micro-steps at a time


class EnginePack:
    """adapter.Pack that trains.

    path: of the adapters' products (kernels.lora.paths; on the CPU "triton" means its reference). graphed: CUDA graphs, where there is a GPU.
    memory: bytes that training may take by the memory model (None: what the GPU has). Raises ValueError for a task that does not fit the
    base or the shape, and for a pack that would not fit the memory, before anything is allocated.
    """

    def __init__(
        self, base: Base, shape: PackShape, task: Task, *, path: str = "triton", deterministic: bool = False, graphed: bool = True, memory: int | None = None
    ) -> None:
        _check(base, shape, task, memory)
        self.base, self.shape, self.task, self.deterministic = base, shape, task, deterministic
        device = base.device
        slots, ranks = len(shape.slots), [s.rank for s in shape.slots]
        self.adapters = Adapters.empty(base.config, ranks=ranks, device=device, compute_dtype=base.dtype)
        self.rows = rows_of(task.train, tokens=shape.tokens, device=device)
        self.seg = Segments.of(rows=[s.rows * shape.tokens for s in shape.slots], ranks=ranks, scales=[0.0] * slots, device=device)
        self._p_S = torch.zeros(slots, dtype=torch.float32, device=device)
        self._seed_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self._step_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self._index_B = torch.full((sum(s.rows for s in shape.slots),), self.rows.idle, dtype=torch.int64, device=device)
        self._open_loss_S = torch.zeros(slots, dtype=torch.float32, device=device)  # sums of the batches that are not full
        self._loss_S = torch.full((slots,), torch.nan, dtype=torch.float32, device=device)
        # on the CPU dropout's products stand apart from the others': all slots take them, or a neighbour's dropout would move a last bit
        self.frame = Frame.of(base.config, self.seg, shape.tokens, self._streams if device.type == "cpu" else None)
        self.ops = operators_for(base, path=path, deterministic=deterministic)
        self._courses: dict[int, Course] = {}
        self._lengths_N, self._answers_N = task.train.lengths, task.train.answer_tokens
        self._graphed = graphed
        self._train_step = Runner(self._micro_step, device=device, graphed=graphed)
        self._optimizer_step = Runner(self._optimize, device=device, graphed=graphed)
        self._judge = Judge(base, self.adapters, self.ops, task.validation, scales=self.seg.scales, graphed=graphed)

    # ---- what a search does ----------------------------------------------------------------------------------------------------

    def admit(self, slot: int, adapter: AdapterConfig) -> None:
        if slot in self._courses or not 0 <= slot < len(self.shape.slots):
            raise ValueError(f"an adapter starts in an empty slot, got {slot=} with {sorted(self._courses)} taken of {len(self.shape.slots)}; release it first")
        if adapter.rank > self.shape.slots[slot].rank:
            raise ValueError(f"a slot holds ranks up to its own, got {adapter.rank=} for {self.shape.slots[slot]}; take a wider slot")
        self.adapters.start(slot, adapter)
        self._settle(slot, Course(adapter=adapter, rows=len(self.task.train)))

    def release(self, slot: int) -> dict[str, np.ndarray]:
        weights = self.weights(slot)
        del self._courses[slot]
        self.adapters.state.clear(slot)
        self.seg.scales[slot] = self._p_S[slot] = self._open_loss_S[slot] = 0.0
        return weights

    def weights(self, slot: int) -> dict[str, np.ndarray]:
        """What `release` would give; the adapter stays."""
        return self.adapters.weights(slot, rank=self._adapter(slot).rank)

    def load(self, slot: int, weights: Mapping[str, np.ndarray]) -> None:
        """Give the slot's adapter these weights (of its rank, as `release` gives them): to judge it, or to train it on with fresh moments."""
        self.adapters.load(slot, weights, rank=self._adapter(slot).rank)

    def advance(self, micro_steps: int) -> float:
        if all(course.done for course in self._courses.values()):
            return 0.0
        self._prepare()
        with _Clock(self.base.device) as clock:
            for start in range(0, micro_steps, _PLANNED):  # the next ones are planned while a GPU works on these
                self._run(plan_steps(self._courses, self.shape, self._lengths_N, self._answers_N, micro_steps=min(_PLANNED, micro_steps - start)))
        return clock.seconds

    def live(self) -> dict[int, Progress]:
        losses = self._loss_S.tolist()
        return {
            slot: Progress(adapter=c.adapter, tokens_seen=c.tokens_seen, optimizer_steps=c.optimizer_steps, loss=losses[slot])
            for slot, c in sorted(self._courses.items())
        }  # fmt: skip

    def evaluate(self) -> tuple[dict[int, Evaluation], float]:
        if not self._courses:
            return {}, 0.0
        self._judge.prepare()
        with _Clock(self.base.device) as clock:
            looks = self._judge.looks({slot: course.tokens_seen for slot, course in sorted(self._courses.items())})
        return looks, clock.seconds

    def state(self) -> dict[str, Any]:
        return checkpoint.state_of(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        checkpoint.restore(self, state)

    # ---- steps -------------------------------------------------------------------------------------------------------------------

    def _adapter(self, slot: int) -> AdapterConfig:
        if slot not in self._courses:
            raise ValueError(f"an adapter is in the slot, got {slot=} with {sorted(self._courses)} taken; admit one first")
        return self._courses[slot].adapter

    @property
    def _streams(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._p_S, self._seed_S, self._step_S

    def _settle(self, slot: int, course: Course) -> None:
        """What the device knows of the slot's adapter beside its numbers."""
        adapter = course.adapter
        self._courses[slot] = course
        self.seg.scales[slot], self._p_S[slot], self._seed_S[slot] = adapter.scale, adapter.dropout, adapter.seed - (adapter.seed >> 63 << 64)
        self._open_loss_S[slot], self._loss_S[slot] = 0.0, torch.nan
        if adapter.dropout and self.frame.streams is None:  # the first one of the pack: the graph of before drops nothing
            self.frame = replace(self.frame, streams=self._streams)
            self._train_step = Runner(self._micro_step, device=self.base.device, graphed=self._graphed)

    def _prepare(self) -> None:
        """Graphs are captured while every row is idle and no slot is due, so that warming up changes no adapter."""
        steps = [step for step in (self._train_step, self._optimizer_step) if not step.ready]
        if steps:
            self._index_B.fill_(self.rows.idle)
            self.adapters.state.settings.zero_()
        for step in steps:
            step.prepare()

    def _run(self, plan: Plan) -> None:
        """Launched, not waited for."""
        device = self.base.device
        rows_NB, steps_NS, settings = (torch.from_numpy(x).to(device) for x in (plan.rows_NB, plan.steps_NS, plan.settings_NSF))
        for n in range(len(plan)):
            self._index_B.copy_(rows_NB[n])
            self._step_S.copy_(steps_NS[n])
            self._train_step()
            if plan.due_N[n]:
                self.adapters.state.settings.copy_(settings[n])
                self._optimizer_step()

    def _micro_step(self) -> None:
        """Adds to the gradients and losses of every slot whose rows are not idle."""
        rows, config, index = self.rows, self.base.config, self._index_B
        bounds = self.frame.answer_bounds(rows.answers)
        with torch.enable_grad():
            h = hidden(self.base, self.adapters.factors, self.ops, rows.ids_NT[index], rows.lengths_N[index], self.frame)
            _, x = self.ops.add_norm(answer_rows(h, rows.places_NA[index]), None, self.base.norm_K, config.rms_eps, bounds)
        loss_A, dx_AK, _ = self.ops.answers(x.detach(), self.base.head_VK, rows.targets_NA[index].flatten(), bounds)
        x.backward(dx_AK)
        self._open_loss_S.add_(self.ops.sums(loss_A, self.frame, rows.answers))

    def _optimize(self) -> None:
        """The step of every slot that is due by AdamState.settings; its loss becomes the mean over the batch's answer tokens."""
        state = self.adapters.state
        due, answers = state.settings[:, 0] != 0, state.settings[:, 5]
        (adamw_step if state.device.type == "cuda" else adamw_step_ref)(state)
        self._loss_S.copy_(torch.where(due, self._open_loss_S / answers, self._loss_S))
        self._open_loss_S.masked_fill_(due, 0.0)


class _Clock:
    """Seconds of the device between entry and exit; of the process where there is no GPU. Waits for the device at exit."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def __enter__(self) -> _Clock:
        if self.device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record(torch.cuda.current_stream(self.device))
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        if self.device.type == "cuda":
            self._events[1].record(torch.cuda.current_stream(self.device))
            self._events[1].synchronize()
            self.seconds = self._events[0].elapsed_time(self._events[1]) / 1e3


def _check(base: Base, shape: PackShape, task: Task, memory: int | None) -> None:
    longest = max(int(part.lengths.max()) for part in (task.train, task.validation))
    if longest > shape.tokens or shape.tokens > base.config.context_tokens:
        raise ValueError(f"sequences hold the task's longest row and fit the base's context, got rows of up to {longest}, {shape.tokens=} and a context of {base.config.context_tokens}; change tokens or drop long rows")
    if task.largest_id >= base.config.vocabulary:
        raise ValueError(f"token ids lie below the base's vocabulary of {base.config.vocabulary}, got {task.largest_id} in {task.name}; take the base's own tokenizer")
    if memory is None and base.device.type == "cuda":
        memory = torch.cuda.mem_get_info(base.device)[1]
    need = predict(base.config, shape, answer_tokens=int(task.train.answer_tokens.max()), element_bytes=base.dtype.itemsize)
    if memory is not None and need.total > memory:
        raise ValueError(f"a pack fits {memory} bytes, got one that takes {need.total} by the memory model: {need}; take fewer or smaller slots, or shorter sequences")

"""A decoder with a cache of keys and values: prefill, then one token a step, on a CPU or as one CUDA graph on a GPU.

    model = prepare(load_smollm2(), family="fma")
    decoder = Decoder(model, batch=2, capacity_tokens=64)
    logits_BV = decoder.prefill([[1, 4093, 198], [1, 30]])  # fp32, of each prompt's last token; decoder.ids_B holds the tokens chosen
    logits_BV = decoder.step()

Legend: M tokens of all rows, N outputs, K inputs, B rows, T new tokens of a row, H query heads, G key heads, D head_dim, P positions,
V vocabulary. The arithmetic is llama.py's: fp32 residual stream, linears read `family.activations`, the cache holds `family.kv`. In an
exact family a row's logits depend on its own tokens alone: how many rows there are, which of them are padded, in which pieces a
prompt arrives and how many ranks compute it cannot change bits. Prompts are packed: padding exists where `pad_to` asks for it, as rows
that the linears compute and nobody reads. No paged cache, no continuous batching, no speculation; generation.py makes whole texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.exact.rope import rope_tables
from kernels.exact.sampling import argmax, argmax_ref, sample, sample_ref
from studies.models.families import fp32_precision
from studies.models.llama import check_tokens
from studies.models.operators import Span
from studies.models.prepared import Layer, Model

__all__ = ["Decoder", "Sampling"]

_WARM_UP = 3  # passes before a capture: the first one compiles


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Gumbel sampling keyed on (seed, request, position); without it the highest logit wins, the lowest index among equals."""

    seed: int
    temperature: float

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64 or not 0 < self.temperature < float("inf"):
            raise ValueError(f"need 0 <= seed < 2^64 and a temperature above 0, got {self=}; for the highest logit pass no Sampling")


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where the tokens of B rows stand among the M rows of a linear. `place_BT`: token -> row (None: M = B * T in order); `source_M`: back."""

    ids_M: torch.Tensor
    batch: int
    tokens: int
    place_BT: torch.Tensor | None = None
    source_M: torch.Tensor | None = None

    def spread(self, x_MN: torch.Tensor) -> torch.Tensor:
        return x_MN.unflatten(0, (self.batch, self.tokens)) if self.place_BT is None else x_MN[self.place_BT]

    def collect(self, x_BTN: torch.Tensor) -> torch.Tensor:
        x = x_BTN.flatten(0, 1)
        return x if self.source_M is None else x[self.source_M]


def _layout(pieces: Sequence[Sequence[int]], width: int, device: torch.device) -> _Layout:
    """Packed where width is 0, else each row's piece at the right end of `width` tokens (id 0 stands to its left)."""
    tokens = max(map(len, pieces))
    ids, place, source = [], [], []
    for row, piece in enumerate(pieces):
        left = max(width - len(piece), 0)
        place.append([len(ids) + left + t if t < len(piece) else 0 for t in range(tokens)])
        source += [row * tokens] * left + [row * tokens + t for t in range(len(piece))]
        ids += [0] * left + list(piece)
    ids_M = torch.tensor(ids, device=device)
    if len(ids) == len(pieces) * tokens == sum(map(len, pieces)):
        return _Layout(ids_M=ids_M, batch=len(pieces), tokens=tokens)
    return _Layout(ids_M=ids_M, batch=len(pieces), tokens=tokens, place_BT=torch.tensor(place, device=device), source_M=torch.tensor(source, device=device))


class Decoder:
    """`batch` rows of a cache of `capacity_tokens` each, for one model. Not for several threads; decoders
    that share a model share its packed weights, which serve one stream at a time.

    `graph`: steps are replays of one CUDA graph, captured at the first step; nothing in it waits for the host.
    Raises ValueError for sizes below 1, a capacity beyond the model's context, and a graph on a CPU or over ranks.
    """

    def __init__(self, model: Model, *, batch: int, capacity_tokens: int, sampling: Sampling | None = None, graph: bool = False) -> None:
        config = model.config
        if batch < 1 or not 1 <= capacity_tokens <= config.context_tokens:
            raise ValueError(f"need batch >= 1 and a capacity of 1 to {config.context_tokens} tokens, got {batch=} {capacity_tokens=}; choose others")
        if graph and (model.device.type != "cuda" or model.parallel.size > 1):
            raise ValueError(f"a CUDA graph needs a GPU of its own, got {model.device=} {model.parallel.size=}; use graph=False")
        self.model, self.batch, self.capacity_tokens, self.sampling = model, batch, capacity_tokens, sampling
        self.lengths = [0] * batch  # tokens of each row in the cache, known without asking the device
        self.rows = 0  # rows in use: those of the last prefill
        self._use_graph, self._graph = graph, None
        device = model.device
        tables = rope_tables(tokens=capacity_tokens, head_dim=config.head_dim, base=config.rope_base)
        self._cos_PD, self._sin_PD = (table.to(device) for table in tables)
        self._caches = [
            model.operators.make_cache(batch=batch, tokens=capacity_tokens, kv_heads=model.kv_heads, head_dim=config.head_dim,
                                       dtype=model.family.kv, device=device) for _ in model.layers
        ]  # fmt: skip
        self.ids_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.request_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self._start_B = torch.zeros(batch, dtype=torch.int32, device=device)
        self._count_B = torch.zeros(batch, dtype=torch.int32, device=device)
        self._logits_BV = torch.zeros((batch, config.vocabulary), dtype=torch.float32, device=device)

    # ---- what a caller does ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], *, requests: Sequence[int] | None = None, chunk: int = 0, pad_to: int = 0
    ) -> torch.Tensor:
        """Forgets all rows, reads the prompts -> logits fp32 [prompts, V] of their last tokens; `ids_B` holds the tokens chosen.

        `requests`: a number for each prompt, to which sampling is keyed (default 0, 1, ...). `chunk`: tokens of a row in one pass
        (0: all). `pad_to`: each row of a pass is padded on the left to this many tokens (0: no padding).
        Raises ValueError for more prompts than rows, for empty or too long ones, and for ids outside the vocabulary.
        """
        requests = range(len(prompts)) if requests is None else requests
        self._check(prompts, requests, chunk, pad_to)
        idle = self.batch - len(prompts)
        longest, rows = max(map(len, prompts)), [*prompts, *([[]] * idle)]
        self.rows, self.lengths = len(prompts), [len(row) for row in rows]
        self.request_B.copy_(torch.tensor([*requests, *([0] * idle)], device="cpu"))
        self._logits_BV.zero_()
        step = chunk or longest
        for first in range(0, longest, step):
            self._pass([row[first : first + step] for row in rows], first, pad_to)
        self._start_B.copy_(torch.tensor(self.lengths, dtype=torch.int32, device="cpu"))
        self._count_B.copy_(torch.tensor([1] * self.rows + [0] * idle, dtype=torch.int32, device="cpu"))
        self._choose()
        return self._logits_BV[: self.rows]

    @torch.no_grad()
    def step(self, next_tokens: Sequence[int] | None = None) -> torch.Tensor:
        """Appends one token to each row (default: those chosen) -> logits fp32 [rows, V], valid until the next call.

        Raises ValueError before a prefill, where a row is full, and for a number of tokens that is not the number of rows.
        """
        if not self.rows or max(self.lengths) >= self.capacity_tokens:
            raise ValueError(f"need a prefill and free room in every row, got {self.rows=} {self.lengths=} {self.capacity_tokens=}; make it larger")
        if next_tokens is not None:
            if len(next_tokens) != self.rows:
                raise ValueError(f"need one token a row, got {len(next_tokens)=} {self.rows=}; pass as many as there were prompts")
            check_tokens(self.model.config, [[token] for token in next_tokens])
            self.ids_B[: self.rows] = torch.tensor(next_tokens, device=self.ids_B.device)
        self.lengths = [length + (row < self.rows) for row, length in enumerate(self.lengths)]
        if not self._use_graph:
            even = self.rows == self.batch and len(set(self.lengths)) == 1
            self._decode(extent=max(self.lengths), even=even)
        else:
            if self._graph is None:
                self.capture()
            self._graph.replay()
        return self._logits_BV[: self.rows]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets all but the first tokens of each row in use; the next `step` names its tokens or repeats the last ones chosen.

        Raises ValueError where a row has fewer tokens than asked for.
        """
        if len(lengths) != self.rows or any(not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=False)):
            raise ValueError(f"need one length a row, none above the row's own, got {lengths=} {self.lengths[: self.rows]=}; rewind only goes back")
        self.lengths[: self.rows] = lengths
        self._start_B[: self.rows] = torch.tensor(lengths, dtype=torch.int32, device="cpu").to(self.model.device)

    @property
    def logits_BV(self) -> torch.Tensor:
        """The buffer that every pass writes: fp32 [batch, V]."""
        return self._logits_BV

    @torch.no_grad()
    def pretend(self, tokens: int, generator: torch.Generator) -> None:
        """Every row has read `tokens` tokens: normal numbers in the cache, random tokens next. For timing steps without a prefill."""
        for cache in self._caches:
            for part in vars(cache).values():
                if isinstance(part, torch.Tensor):
                    part.normal_(generator=generator)
        self.rows, self.lengths = self.batch, [tokens] * self.batch
        self.ids_B.random_(self.model.config.vocabulary, generator=generator)
        self._start_B.fill_(tokens)
        self._count_B.fill_(1)

    @torch.no_grad()
    def repeat_step(self) -> None:
        """The step of the last token that fits, with the state left as it was: the same work each time, for timing. Can be captured."""
        kept_B = self.ids_B.clone()
        self._decode(extent=self.capacity_tokens, even=True)
        self._start_B.sub_(self._count_B)
        self.ids_B.copy_(kept_B)

    @torch.no_grad()
    def capture(self, *, full: bool = False) -> None:
        """Captures the step; `step` then replays it. The state stays as it was.

        `full`: every row is one token short of full, so plain attention needs no mask: the step of that one length, for timing.
        """
        with torch.cuda.device(self.model.device):
            self._capture(full)

    def _capture(self, full: bool) -> None:
        kept = self._count_B.clone(), self.ids_B.clone(), self._logits_BV.clone()
        self._count_B.zero_()  # nothing is appended and no row moves on
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._decode(extent=self.capacity_tokens, even=full)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._decode(extent=self.capacity_tokens, even=full)
        for buffer, value in zip((self._count_B, self.ids_B, self._logits_BV), kept, strict=True):
            buffer.copy_(value)

    # ---- passes ----------------------------------------------------------------------------------------------------------------

    def _pass(self, pieces: Sequence[Sequence[int]], first: int, pad_to: int) -> None:
        """Reads one piece of each row from position `first` on; keeps the logits of rows that end in it."""
        device = self.model.device
        counts = [len(piece) for piece in pieces]
        layout = _layout(pieces, pad_to, device)
        start_B = torch.tensor([first if count else 0 for count in counts], dtype=torch.int32, device=device)
        position_BT = (start_B[:, None] + torch.arange(layout.tokens, device=device)).clamp(max=self.capacity_tokens - 1)
        span = Span(start_B=start_B, count_B=torch.tensor(counts, dtype=torch.int32, device=device), position_BT=position_BT,
                    extent=first + layout.tokens, even=len(set(counts)) == 1)
        ending = [row for row, count in enumerate(counts) if count and self.lengths[row] == first + count]
        # the row of the linears where the last token of each ending row stands
        place_BT = torch.arange(len(layout.ids_M), device="cpu").view(-1, layout.tokens) if layout.place_BT is None else layout.place_BT.cpu()
        last_R = torch.tensor([int(place_BT[row, counts[row] - 1]) for row in ending], dtype=torch.int64, device=device)
        logits_RV = self._forward(layout, span, last_R)
        if logits_RV is not None:
            self._logits_BV[torch.tensor(ending, device=device)] = logits_RV

    def _decode(self, *, extent: int, even: bool) -> None:
        """One token of every row; all state is in device tensors, so this can be captured."""
        layout = _Layout(ids_M=self.ids_B, batch=self.batch, tokens=1)
        span = Span(start_B=self._start_B, count_B=self._count_B, position_BT=self._start_B[:, None], extent=extent, even=even)
        self._logits_BV.copy_(self._forward(layout, span, None))
        self._start_B.add_(self._count_B)
        self._choose()

    def _choose(self) -> None:
        """The next token of every row; it will stand at position `_start_B`."""
        logits_BV, gpu = self._logits_BV, self.model.device.type == "cuda"
        if self.sampling is None:
            self.ids_B.copy_((argmax if gpu else argmax_ref)(logits_BV))
            return
        pick = sample if gpu else sample_ref
        self.ids_B.copy_(
            pick(logits_BV, seed=self.sampling.seed, request_M=self.request_B, position_M=self._start_B, temperature=self.sampling.temperature)
        )

    def _forward(self, layout: _Layout, span: Span, last_R: torch.Tensor | None) -> torch.Tensor | None:
        """Logits fp32 of the rows `last_R` of the linears (None: all, in order); None where there are none."""
        model, eps = self.model, self.model.config.rms_eps
        ops, dtype = model.operators, model.family.activations
        with fp32_precision(model.family.precision):
            h_MK, delta_MK = model.embed_VK[layout.ids_M].to(model.family.residual), None
            for layer, cache in zip(model.layers, self._caches, strict=True):
                h_MK, x_MK = ops.add_norm(h_MK, delta_MK, layer.input_norm_K, eps, dtype)
                delta_MK = self._attend(layer, cache, x_MK, layout, span)
                h_MK, x_MK = ops.add_norm(h_MK, delta_MK, layer.post_norm_K, eps, dtype)
                delta_MK = model.linear(ops.swiglu(model.linear(x_MK, layer.gate_up), dtype), layer.down, split_k=model.split_mlp)
            if last_R is not None:
                if not len(last_R):
                    return None
                h_MK, delta_MK = h_MK[last_R], delta_MK[last_R]
            return model.logits(ops.add_norm(h_MK, delta_MK, model.norm_K, eps, dtype)[1])

    def _attend(self, layer: Layer, cache: object, x_MK: torch.Tensor, layout: _Layout, span: Span) -> torch.Tensor:
        model, ops = self.model, self.model.operators
        heads, kv, dim = model.heads, model.kv_heads, model.config.head_dim
        qkv_MN = model.linear(x_MK, layer.qkv)
        if layer.qkv_bias_N is not None:
            qkv_MN = qkv_MN + layer.qkv_bias_N
        qkv_BTHD = layout.spread(qkv_MN).unflatten(2, (heads + 2 * kv, dim))
        qk_BTHD = ops.rope(qkv_BTHD[:, :, : heads + kv], span.position_BT, self._cos_PD, self._sin_PD, model.family.kv)
        ops.append(cache, qk_BTHD[:, :, heads:], qkv_BTHD[:, :, heads + kv :], span)
        o_BTHD = ops.attention(qk_BTHD[:, :, :heads], cache, span, model.family.activations)
        return model.linear(layout.collect(o_BTHD.flatten(2)), layer.o, split_k=model.split_heads)

    def _check(self, prompts: Sequence[Sequence[int]], requests: Sequence[int], chunk: int, pad_to: int) -> None:
        if not 1 <= len(prompts) <= self.batch or len(requests) != len(prompts):
            raise ValueError(f"need 1 to {self.batch} prompts and a request number for each, got {len(prompts)=} {len(requests)=}; make more passes")
        check_tokens(self.model.config, prompts)
        longest = max(map(len, prompts))
        if longest > self.capacity_tokens:
            raise ValueError(f"a prompt must fit into the cache, got {longest=} {self.capacity_tokens=}; shorten it or raise capacity_tokens")
        if chunk < 0 or pad_to < 0 or 0 < pad_to < min(chunk or longest, longest):
            raise ValueError(f"chunk and pad_to are 0 or positive, and padding never cuts, got {chunk=} {pad_to=} {longest=}; raise pad_to")

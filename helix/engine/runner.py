"""`Runner`: runs a step's plan through the model, and a decode step as a captured CUDA graph.

Three ways, same results:

* `eager`: every step gets tensors of its own (`build_batch`). Prefill and everything else that is no plain decode
  step always runs so.
* `static`: decode steps run from static inputs, padded to the next bucket (1, 2, 4, ... `max_batch`).
* `graph`: the same, and the step of each bucket, from the embedding to the choice of tokens, is captured when it is
  first needed; from then on one launch replays it. Nothing in such a step depends on the host: lengths are read on the
  device, and the buffers are owned here.

In all three the tokens stay on the device as the next step's inputs, so that it can be launched before they are read.
Decode steps run in as many chunks as `choose_chunks` says for their batch and mean context (HOP-B, see
`helix.layers.overlap`); all other steps run in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from helix.cache.pools import KVCache
from helix.comm.mesh import Mesh
from helix.comm.world import World
from helix.config import RunConfig
from helix.engine.batch import build_batch, host_tensor
from helix.engine.draw import choose_tokens
from helix.engine.inputs import StaticInputs
from helix.engine.request import Choice
from helix.engine.scheduler import StepItem, StepPlan
from helix.errors import ConfigError
from helix.layers.batch import Batch
from helix.layers.decoder import Decoder
from helix.layers.overlap import LOCKSTEP, Overlap
from helix.layout import PageRule
from helix.model_spec import ModelSpec

Mode = Literal["eager", "static", "graph"]
ChooseChunks: TypeAlias = Callable[[int, int], int]
"""(batch, mean context in tokens) of a decode step -> the chunks it is cut into."""
BatchTap: TypeAlias = Callable[[Batch, int, Tensor], None]
"""Sees (batch, layer, its output [T, C]); layer -1 is the embedding."""

# Time in which a graph's first run may compile its kernels before the rank counts as stalled.
_CAPTURE_LIMIT_S = 300.0
# Rank 0 alone knows what such rows are drawn by; the others receive its tokens.
_DRAWN = ("drawn", "ranked")


@dataclass(frozen=True, slots=True)
class StepRun:
    """What a step gave: fp32 `logits_RV` of the R rows that sample, and the token chosen for each (int64 `token_R`).

    A token may be one of the scheduler's marks, `NOT_FINITE` or `UNDECIDED`. `hidden_TC` is None for a decode step from
    static inputs. The tokens, and then the logits too, are valid until the next step.
    """

    logits_RV: Tensor
    token_R: Tensor
    hidden_TC: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: StepRun


class Runner:
    """The steps of one rank; see the module's text. Collective over all ranks of the model's mesh."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        rule: PageRule,
        mesh: Mesh,
        world: World,
        *,
        mode: Mode,
        choose_chunks: ChooseChunks,
        max_batch: int,
        max_context: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.rule = rule
        self.mesh = mesh
        self.world = world
        self.mode: Mode = mode
        self.buckets = batch_buckets(max_batch)
        # The last step's tokens, and which row is whose, by request id.
        self._chosen_B = torch.zeros(max_batch, dtype=torch.int64, device=mesh.device)
        self._chosen: dict[int, int] = {}
        self._inputs: StaticInputs | None = None
        if mode != "eager":
            max_rows = min(rule.rows_for(max_context), cache.num_rows)
            self._inputs = StaticInputs(max_batch, max_rows, rule, mesh.coords.kvp_rank, mesh.device)
            self._chosen_B = self._inputs.chosen_B
        self._overlaps = _Overlaps(choose_chunks, mesh.device)
        self._graphs: dict[tuple[int, int, Choice], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if mode == "graph" else None
        world.holds_graphs(self)

    def drop_graphs(self) -> None:
        """Forget what was captured; it is captured again when it is next needed."""
        self._graphs.clear()

    def run(
        self,
        plan: StepPlan,
        tap: BatchTap | None = None,
        *,
        choice: Choice = "best",
        numbers_R5: np.ndarray | None = None,
    ) -> StepRun:
        """Launch `plan`, whose pending tokens the last `run` gave; nothing on the device is waited for.

        Tokens are chosen as the plan's `choice` says, the same on every rank ("host" gives the best ones here); rank 0
        passes the `numbers_R5` that the rows are drawn by. `tap` sees each layer's output.
        """
        choice = "best" if choice == "host" else choice
        if self._inputs is None or tap is not None or not is_decode(plan, self.buckets[-1]):
            result = self._run_eagerly(plan, choice, numbers_R5, tap)
        else:
            num_rows = len(plan.items)
            bucket = next(size for size in self.buckets if size >= num_rows)
            self._inputs.write(plan.items, self._chosen, numbers_R5)
            batch = replace(self._inputs.batch(bucket), overlap=self._overlaps.of(plan.items, bucket))
            run = self._replay(batch, choice) if self.mode == "graph" else self._decode(batch, choice)
            result = StepRun(run.logits_RV[:num_rows], run.token_R[:num_rows])
        sampled = (item.request.request_id for item in plan.items if item.samples)
        self._chosen = {request_id: row for row, request_id in enumerate(sampled)}
        return result

    def _run_eagerly(
        self, plan: StepPlan, choice: Choice, numbers_R5: np.ndarray | None, tap: BatchTap | None
    ) -> StepRun:
        batch = build_batch(plan, self.rule, self.mesh.coords.kvp_rank, self.mesh.device)
        batch = replace(batch, overlap=self._overlaps.of(plan.items, len(plan.items)))
        self._feed_pending(plan, batch)
        layer_tap = None if tap is None else lambda index, x_TC: tap(batch, index, x_TC)
        with self.mesh.kvp.clock.step(self.mesh.device):
            hidden_TC = self.model(batch, self.cache, layer_tap)
        if not batch.sample_T.shape[0]:
            nothing = hidden_TC.new_empty(0, 0, dtype=torch.float32)
            return StepRun(nothing, batch.sample_T, hidden_TC)
        logits_RV = self.model.logits(hidden_TC[batch.sample_T])
        numbers = None if numbers_R5 is None else self._to_device(numbers_R5)
        return StepRun(logits_RV, self._choose(logits_RV, numbers, choice), hidden_TC)

    def _feed_pending(self, plan: StepPlan, batch: Batch) -> None:
        """Put the tokens that the last step chose into `batch`."""
        stops = np.cumsum([item.count for item in plan.items])
        pending = [index for index, item in enumerate(plan.items) if item.feeds_pending]
        if pending:
            rows = [self._chosen[plan.items[index].request.request_id] for index in pending]
            at_2P = self._to_device(np.stack([stops[pending] - 1, np.array(rows)]))
            batch.token_ids_T.index_copy_(0, at_2P[0], self._chosen_B[at_2P[1]])

    def _decode(self, batch: Batch, choice: Choice) -> StepRun:
        """A step from static inputs."""
        inputs, size = self._inputs_or_fail(), len(batch.counts_S)
        inputs.take_tokens(size)
        logits_RV = self.model.logits(self.model(batch, self.cache))
        return StepRun(logits_RV, self._choose(logits_RV, inputs.numbers_R5(size), choice))

    def _choose(self, logits_RV: Tensor, numbers_R5: Tensor | None, choice: Choice) -> Tensor:
        """The tokens, in `_chosen_B`. The best ones need no message: every rank has the same logits."""
        token_R = self._chosen_B[: logits_RV.shape[0]]
        if choice not in _DRAWN or self.mesh.world.index == 0:
            token_R.copy_(choose_tokens(logits_RV, numbers_R5, choice))
        return self.mesh.world.broadcast(token_R) if choice in _DRAWN else token_R

    def _replay(self, batch: Batch, choice: Choice) -> StepRun:
        key = len(batch.counts_S), batch.overlap.num_chunks, choice
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(batch, choice)
        # Collectives inside of a graph cannot report: the whole step counts as one, which finds a rank that stays away.
        self.world.monitor.beat(f"replaying a step of {len(batch.counts_S)} sequences")
        captured.graph.replay()
        return captured.result

    def _capture(self, batch: Batch, choice: Choice) -> _Captured:
        """Capture a step from static inputs. It first runs once as it is: a step that runs twice stores the same."""
        what = f"capturing a step of {len(batch.counts_S)} sequences"
        with self.world.monitor.long_operation(what, _CAPTURE_LIMIT_S):
            # Compiles the kernels, and lets libraries make their handles, outside of the graph.
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                chosen_B = self._chosen_B.clone()
                self._decode(batch, choice)
                self._chosen_B.copy_(chosen_B)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = self._decode(batch, choice)
        return _Captured(graph, result)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return host_tensor(values, self.mesh.device).to(self.mesh.device, non_blocking=True)

    def _inputs_or_fail(self) -> StaticInputs:
        if self._inputs is None:
            raise ValueError("an eager runner has no static inputs")
        return self._inputs


class _Overlaps:
    """The `Overlap` of each step. Contexts count as the power of two below, so that few steps have to be priced."""

    def __init__(self, choose_chunks: ChooseChunks, device: torch.device) -> None:
        self._choose = choose_chunks
        # Blocks of an exchange go first where both streams have some to place: they are few, and waited for.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._known: dict[tuple[int, int], Overlap] = {}

    def of(self, items: Sequence[StepItem], batch: int) -> Overlap:
        """How a step of `items`, padded to `batch` sequences, runs; in lockstep unless each feeds one token."""
        if any(item.count != 1 for item in items):
            return LOCKSTEP
        context = sum(item.start + 1 for item in items) // len(items)
        key = batch, 1 << (context.bit_length() - 1)
        if key not in self._known:
            self._known[key] = Overlap(self._choose(*key), self._stream)
        return self._known[key]


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Sizes that decode steps are padded to: powers of two below `max_batch`, and `max_batch`."""
    powers = [1 << exponent for exponent in range(max_batch.bit_length()) if 1 << exponent < max_batch]
    return (*powers, max_batch)


def is_decode(plan: StepPlan, max_batch: int) -> bool:
    """Whether every item of `plan` feeds one token, samples, and wants nothing but the next token."""
    plain = all(item.count == 1 and item.samples and item.request.collect == "tokens" for item in plan.items)
    return plain and len(plan.items) <= max_batch


def choose_mode(config: RunConfig, spec: ModelSpec, world: World, dtype: torch.dtype) -> Mode:
    """How decode steps run: what ``engine.graphs`` asks for, on these ranks.

    Raises: ConfigError where it is ``on`` and the ranks or the dtype cannot be captured.
    """
    setting = config.engine.graphs
    problem = capture_problem(config, spec, world, dtype)
    if setting == "on" and problem is not None:
        raise ConfigError(f"engine.graphs=on: {problem}; use auto or off")
    return "eager" if setting == "off" or problem is not None else "graph"


def capture_problem(config: RunConfig, spec: ModelSpec, world: World, dtype: torch.dtype) -> str | None:
    """Why a decode step cannot be captured on these ranks; None where it can."""
    if world.device.type != "cuda":
        return "CUDA graphs need a GPU"
    if world.size > 1 and world.local_size > torch.cuda.device_count():
        return "several ranks share a GPU, so gloo carries the collectives, and that cannot be captured"
    if spec.moe is not None and config.comm.dispatch == "alltoall":
        return "comm.dispatch=alltoall reads row counts on the host"
    if spec.moe is not None and dtype is not torch.bfloat16:
        return f"experts in {str(dtype).removeprefix('torch.')} are run one by one from the host"
    return None

"""`Runner`: runs a step's plan through the model, and a decode step as a captured CUDA graph.

Three ways, same results:

* `eager`: every step gets tensors of its own (`build_batch`). Prefill and everything else that is no plain decode
  step always runs so.
* `static`: decode steps run from static inputs, padded to the next bucket (1, 2, 4, ... `max_batch`).
* `graph`: the same, and the step of each bucket, from the embedding to the greedy choice of tokens, is captured when
  it is first needed; from then on one launch replays it. Nothing in such a step depends on the host: lengths are read
  on the device, and the buffers are owned here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from helix.cache.pools import KVCache
from helix.comm.mesh import Mesh
from helix.comm.world import World
from helix.config import RunConfig
from helix.engine.batch import build_batch
from helix.engine.inputs import StaticInputs
from helix.engine.scheduler import NOT_FINITE, StepPlan
from helix.errors import ConfigError
from helix.layers.batch import Batch
from helix.layers.decoder import Decoder
from helix.layout import PageRule
from helix.model_spec import ModelSpec

Mode = Literal["eager", "static", "graph"]
BatchTap: TypeAlias = Callable[[Batch, int, Tensor], None]
"""Sees (batch, layer, its output [T, C]); layer -1 is the embedding."""

# Time in which a graph's first run may compile its kernels before the rank counts as stalled.
_CAPTURE_LIMIT_S = 300.0
# Parts that the vocabulary is searched in, where it divides.
_MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class StepRun:
    """What a step gave: fp32 `logits_RV` of the R rows that sample, and the best token of each.

    `best_R` is `NOT_FINITE` for a row whose best logit is not finite. `hidden_TC` is None for a decode step from static
    inputs, whose results are valid until the next step.
    """

    logits_RV: Tensor
    best_R: Tensor
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
        self._inputs: StaticInputs | None = None
        if mode != "eager":
            max_rows = min(rule.rows_for(max_context), cache.num_rows)
            self._inputs = StaticInputs(max_batch, max_rows, rule, mesh.coords.kvp_rank, mesh.device)
        self._graphs: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if mode == "graph" else None

    def run(self, plan: StepPlan, tap: BatchTap | None = None) -> StepRun:
        """Run `plan`; `tap` sees each layer's output."""
        if self._inputs is None or tap is not None or not is_decode(plan, self.buckets[-1]):
            return self._run_eagerly(plan, tap)
        num_rows = len(plan.items)
        bucket = next(size for size in self.buckets if size >= num_rows)
        self._inputs.write(plan.items)
        result = self._replay(bucket) if self.mode == "graph" else self._decode(self._inputs.batch(bucket))
        return StepRun(result.logits_RV[:num_rows], result.best_R[:num_rows])

    def _run_eagerly(self, plan: StepPlan, tap: BatchTap | None) -> StepRun:
        batch = build_batch(plan, self.rule, self.mesh.coords.kvp_rank, self.mesh.device)
        layer_tap = None if tap is None else lambda index, x_TC: tap(batch, index, x_TC)
        with self.mesh.kvp.clock.step(self.mesh.device):
            hidden_TC = self.model(batch, self.cache, layer_tap)
        if not batch.sample_T.shape[0]:
            nothing = hidden_TC.new_empty(0, 0, dtype=torch.float32)
            return StepRun(nothing, batch.sample_T, hidden_TC)
        logits_RV = self.model.logits(hidden_TC[batch.sample_T])
        return StepRun(logits_RV, best_tokens(logits_RV), hidden_TC)

    def _decode(self, batch: Batch) -> StepRun:
        logits_RV = self.model.logits(self.model(batch, self.cache))
        return StepRun(logits_RV, best_tokens(logits_RV))

    def _replay(self, bucket: int) -> StepRun:
        captured = self._graphs.get(bucket)
        if captured is None:
            captured = self._graphs[bucket] = self._capture(bucket)
        captured.graph.replay()
        return captured.result

    def _capture(self, bucket: int) -> _Captured:
        """Capture the step of `bucket` rows. It first runs once as it is: a step that runs twice stores the same."""
        batch = (self._inputs_or_fail()).batch(bucket)
        with self.world.monitor.long_operation(f"capturing a step of {bucket} sequences", _CAPTURE_LIMIT_S):
            # Compiles the kernels, and lets libraries make their handles, outside of the graph.
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self._decode(batch)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = self._decode(batch)
        return _Captured(graph, result)

    def _inputs_or_fail(self) -> StaticInputs:
        if self._inputs is None:
            raise ValueError("an eager runner has no static inputs")
        return self._inputs


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """Sizes that decode steps are padded to: powers of two below `max_batch`, and `max_batch`."""
    powers = [1 << exponent for exponent in range(max_batch.bit_length()) if 1 << exponent < max_batch]
    return (*powers, max_batch)


def is_decode(plan: StepPlan, max_batch: int) -> bool:
    """Whether every item of `plan` feeds one token, samples, and wants nothing but the next token."""
    plain = all(item.count == 1 and item.samples and item.request.collect == "tokens" for item in plan.items)
    return plain and len(plan.items) <= max_batch


def best_tokens(logits_RV: Tensor) -> Tensor:
    """int64 [R]: id of each row's largest logit, the lowest id among equals; `NOT_FINITE` where that is NaN or inf.

    The vocabulary is searched in equal parts side by side: on a GPU one row alone would occupy one multiprocessor.
    """
    vocab = logits_RV.shape[1]
    parts = math.gcd(vocab, _MAX_PARTS)
    best_RP, place_RP = logits_RV.unflatten(1, (parts, -1)).max(dim=-1)
    best_R, part_R = best_RP.max(dim=-1)
    token_R = part_R * (vocab // parts) + place_RP.gather(1, part_R.unsqueeze(1)).squeeze(1)
    return torch.where(best_R.isfinite(), token_R, NOT_FINITE)


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

"""`helix.Engine`: what a person holds. Rank 0's side of the engine, with text in and text out.

Under the `deepspeed` launcher the engine joins the ranks that exist: the constructor returns on rank 0 only; on the
others it serves rank 0's steps and ends the process when rank 0 closes, so that one script reads the same with and
without a launcher. In a plain process it starts the other ranks itself and ends them with it.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from helix.comm.clock import Clock
from helix.comm.monitor import end_process
from helix.comm.world import World, open_store, pick_device
from helix.config import LaunchEnv, RunConfig, config_to_dict, launch_env, make_config
from helix.engine.build import build_core, resolve_layout, resolve_spec
from helix.engine.core import EngineCore, StepOps, StepSinks
from helix.engine.generation import Generation, sample_batch
from helix.engine.grammar import Grammars
from helix.engine.join import end_on_sigterm, enter_world, follow, leave, share_cores
from helix.engine.outputs import Output, Piece
from helix.engine.request import Request
from helix.engine.sampler import SampleRow, sample
from helix.engine.sampling import SamplingParams
from helix.engine.scheduler import StepItem
from helix.engine.spawn import SpawnedRanks, spawn_ranks
from helix.engine.text import TextStream, encode_prompt, load_tokenizer
from helix.errors import RankFailure, RequestError
from helix.layers.batch import Batch
from helix.layout import Layout
from helix.model_spec import ModelSpec
from model_zoo import generation_eos

log = logging.getLogger("helix")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
LayerTap = Callable[[Batch, int, Tensor], None]

# How long rank 0 waits for its own collective to break after another rank failed, before it ends the process.
_GRACE_S = 10.0


class Engine:
    """A running model.

    Parameters
    ----------
    config
        Path of a YAML file, or a mapping of its sections.
    sections
        Any YAML section as a mapping (``model`` also takes a path or a card's name); they override the file key by key.
    progress
        Called as ``progress(tensor name, bytes)`` for each tensor that rank 0 reads while loading.
    world
        Ranks that were joined already, for a program that manages its own (this is rank 0 of them, the others call
        `helix.engine.join.follow`). The engine closes it.

    Raises
    ------
    ConfigError, LayoutError, CheckpointError
        Before any rank starts a step, naming field, value and what would be right.
    RankFailure
        A rank died, raised or stopped answering.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        progress: Callable[[str, int], None] | None = None,
        world: World | None = None,
        **sections: Any,
    ) -> None:
        self.config: RunConfig = make_config(config, **sections)
        env = launch_env() if world is None else None
        if env is not None:
            end_on_sigterm()
        if env is not None and env.rank != 0:
            share_cores(env.local_size)
            follow(self.config, enter_world(self.config, env))
            raise SystemExit(0)
        self.spec: ModelSpec = resolve_spec(self.config)
        self.layout: Layout = resolve_layout(self.config, self.spec, self._num_ranks(env, world))
        # A model card has no directory beside it: no tokenizer, and the ends that its own config names.
        path = Path(self.config.model.path) if self.config.model.path else None
        self.tokenizer = load_tokenizer(path) if path else None
        self.eos_token_ids = frozenset(generation_eos(path) if path else self.spec.eos_token_ids)
        self._grammars = Grammars(self.tokenizer, self.spec.vocab_size, self.eos_token_ids)
        self._ranks = SpawnedRanks()
        self._generations: dict[int, Generation] = {}
        self._cancelled: list[int] = []
        self._new: list[Request] = []
        self._next_id = itertools.count()
        self._lock = threading.RLock()
        self._closed = False
        self._ended = threading.Event()
        self._failure: RankFailure | None = None
        self._tap: LayerTap | None = None
        self._threads = torch.get_num_threads()
        self._core = self._start(env, world, progress)

    # ---- life ----

    def _num_ranks(self, env: LaunchEnv | None, world: World | None) -> int | None:
        """Ranks that exist; in a plain process None (as many as the layout says), or with `auto` one a GPU."""
        if world is not None:
            return world.size
        if env is not None:
            return env.world_size
        if self.config.layout != "auto":
            return None
        on_gpu = pick_device(self.config.engine.device, 0).type == "cuda"
        return torch.cuda.device_count() if on_gpu else 1

    def _start(
        self, env: LaunchEnv | None, world: World | None, progress: Callable[[str, int], None] | None
    ) -> EngineCore:
        try:
            if world is None:
                share_cores(env.local_size if env else self.layout.num_ranks)
                world = self._spawn() if env is None and self.layout.num_ranks > 1 else enter_world(self.config, env)
            core = build_core(self.config, self.spec, self.layout, world, progress)
            world.monitor.idle()
            return core
        except BaseException as error:
            blamed = self._fail(error, world)
            if blamed is error:
                raise
            raise blamed from error

    def _spawn(self) -> World:
        """Start the other ranks on this machine and meet them."""
        size = self.layout.num_ranks
        store = open_store("127.0.0.1", 0, serve=True)
        self._ranks = spawn_ranks(config_to_dict(self.config), size, store.port)
        env = LaunchEnv(
            rank=0, world_size=size, local_rank=0, local_size=size, master_addr="127.0.0.1", master_port=store.port
        )
        return enter_world(self.config, env, store=store, on_failure=self._rank_failed, processes=self._ranks.processes)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the other ranks and free what this process holds; safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ended.set()
            if self._failure is None:
                self._core.lead(StepOps(cancel=self._take_cancelled(), close=True), self._sinks())
                self._core.world.close()
                self._ranks.wait()
            else:
                self._ranks.kill()
                self._core.world.close()
            torch.set_num_threads(self._threads)

    def _rank_failed(self, failure: RankFailure) -> None:
        """Monitor thread, plain process: another rank failed. Ending all ranks breaks the collective we may wait in."""
        self._failure = failure
        self._ranks.kill()
        self._ended.wait(_GRACE_S)
        if not self._closed and not self._lock_is_free():
            end_process(failure)

    def _lock_is_free(self) -> bool:
        """Whether the main thread got out of its step."""
        acquired = self._lock.acquire(timeout=1.0)
        if acquired:
            self._lock.release()
        return acquired

    def _fail(self, error: BaseException, world: World | None) -> BaseException:
        """The engine is over: end the other ranks. Returns what to raise: `error`, or the failure that caused it."""
        if world is not None:
            self._failure = leave(world, error)
        self._ranks.kill()
        return error if self._failure is None or self._failure.rank == 0 else self._failure

    # ---- requests ----

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Generate for every prompt, batched together; outputs in the order of the prompts.

        `params` is one `SamplingParams` for all prompts or one a prompt.

        Raises
        ------
        RequestError
            A prompt or its parameters cannot be served; nothing was started and the engine goes on.
        """
        several = _as_list(prompts)
        each = _params_for(several, params)
        generations = [self.prepare(prompt, one) for prompt, one in zip(several, each, strict=True)]
        self._run(generations)
        return [one.output() for one in generations]

    def warm_up(self) -> None:
        """Run once what later steps need made: kernels are compiled, and decode steps of every size captured.

        Without it the first request of each size, and the first prompts beside running requests, wait for that. On a
        GPU a fraction of a second a size, and once a machine half a minute more, since compiled kernels are kept on
        disk.
        """
        runner = self._core.runner
        eager = runner.mode == "eager"
        for size in (1,) if eager else runner.buckets:
            for temperature in (0.0, 1.0):
                params = SamplingParams(max_tokens=3, temperature=temperature, ignore_eos=True)
                self.generate([[0]] * size, params)
        if eager and runner.mesh.device.type == "cpu":
            return
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        chunk, longest = self.config.engine.prefill_chunk, self.max_context - params.max_tokens
        for number, lengths in enumerate(prompts_of_every_size(chunk, longest, runner.buckets)):
            # Tokens of its own, so that nothing is found in the cache.
            self.generate([[number % self.spec.vocab_size] * length for length in lengths], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Pieces of one generation as they come. Leaving the loop early and closing the stream cancels it."""
        generation = self.prepare(prompt, params)
        self.submit([generation])
        return Stream(self._pieces(generation), generation)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """fp32 logits [len, V] after each token of `token_ids`, on the CPU."""
        generation = self.prepare(list(token_ids), logits_only=True)
        self._run([generation])
        return generation.all_logits()

    def trace(self, token_ids: Sequence[int], tap: LayerTap) -> Tensor:
        """`logits`, with every layer's output shown to ``tap(batch, layer, x_TC)`` on the way (-1: the embedding)."""
        self._tap = tap
        try:
            return self.logits(token_ids)
        finally:
            self._tap = None

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a prompt: text, chat messages (through the checkpoint's template, with `tools`) or ids."""
        return encode_prompt(self.tokenizer, prompt, self.spec.vocab_size, tools=tools)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how to turn chat messages into tokens."""
        return self.tokenizer is not None and self.tokenizer.chat_template is not None

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens, prompt and output together."""
        return self._core.scheduler.max_context

    @property
    def num_page_rows(self) -> int:
        """Page rows of the whole cache."""
        return self._core.scheduler.num_rows

    @property
    def num_free_rows(self) -> int:
        """Page rows that no request holds, idle ones among them."""
        return self._core.scheduler.num_free_rows

    @property
    def num_idle_rows(self) -> int:
        """Page rows that no request holds and whose content a request may still begin with (``cache.prefix_reuse``)."""
        return self._core.scheduler.num_idle_rows

    @property
    def num_reused_tokens(self) -> int:
        """Tokens that were found in page rows instead of being computed."""
        return self._core.scheduler.num_reused_tokens

    @property
    def exchange_clock(self) -> Clock:
        """Time that exchanges take in this rank's sampled steps."""
        return self._core.mesh.kvp.clock

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return self._core.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that were submitted and do not run: new ones, and those that were preempted."""
        return self._core.scheduler.num_waiting + len(self._new)

    @property
    def num_preemptions(self) -> int:
        """How often a request gave its rows back and was computed again."""
        return self._core.scheduler.num_preemptions

    # ---- one step at a time: what `generate`, `stream` and the server are made of ----

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        logits_only: bool = False,
    ) -> Generation:
        """Encode and check one prompt; nothing is queued yet. May be called from any thread, while steps run.

        Smaller `priority` is served first. With `logits_only` nothing is generated (see `logits`).

        Raises
        ------
        RequestError
            The prompt or its parameters can never be served.
        RankFailure
            The engine has ended.
        """
        if self._closed:
            raise RequestError("the engine is closed; make a new one")
        if self._failure is not None:
            raise self._failure
        params = params or SamplingParams()
        params.check_vocab(self.spec.vocab_size)
        prompt_ids = self.encode(prompt)
        request_id = next(self._next_id)
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            max_tokens=0 if logits_only else params.max_tokens,
            stop_token_ids=eos | frozenset(params.stop_token_ids),
            min_tokens=params.min_tokens,
            collect="all_logits" if logits_only or params.prompt_logprobs is not None else "tokens",
            priority=priority,
        )
        self._core.scheduler.check_fits(request)
        seed = params.seed if params.seed is not None else self.config.engine.seed + request_id
        grammar = None if params.json_schema is None else self._grammars.compile(params.json_schema)
        row = SampleRow(params, request.prompt_ids, request.output_ids, seed, self.eos_token_ids, grammar)
        request.choice = row.choice
        return Generation(request, params, row, TextStream(self.tokenizer, params), keep_logits=logits_only)

    def submit(self, generations: Iterable[Generation]) -> None:
        """Queue prepared generations, each once; they start with the next `step`."""
        with self._lock:
            for one in generations:
                self._generations[one.request.request_id] = one
                self._new.append(one.request)

    def cancel(self, generations: Iterable[Generation]) -> None:
        """Forget generations, at any moment; those that still run end, on every rank, with the next `step`."""
        with self._lock:
            for one in generations:
                self._generations.pop(one.request.request_id, None)
                if not one.finished:
                    self._cancel(one.request)

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do anything."""
        return bool(self._new or self._cancelled or self._core.scheduler.has_work)

    @property
    def failure(self) -> RankFailure | None:
        """What ended the engine, None while it serves. May be set at any moment, by the monitor's thread."""
        return self._failure

    def step(self) -> None:
        """Take in what was submitted and cancelled and run one step; then see `Generation.take_pieces`."""
        with self._lock:
            new, self._new = tuple(self._new), []
            self._lead(StepOps(add=new, cancel=self._take_cancelled()))

    def _run(self, generations: Sequence[Generation]) -> None:
        """Step until all of `generations` are finished; an exception on the way cancels them."""
        with self._lock:
            self.submit(generations)
            try:
                while not all(one.finished for one in generations):
                    self.step()
            finally:
                self._drop(generations)

    def _pieces(self, generation: Generation) -> Generator[Piece, None, None]:
        try:
            while True:
                with self._lock:
                    if not generation.pieces and not generation.finished:
                        self.step()
                    pieces = generation.take_pieces()
                yield from pieces
                if generation.finished and not generation.pieces:
                    return
        finally:
            self._drop([generation])

    def _drop(self, generations: Iterable[Generation]) -> None:
        """Forget generations; those that still run are cancelled, on every rank, before this returns."""
        with self._lock:
            self.cancel(generations)
            if self._cancelled and not self._closed and self._failure is None:
                self.step()

    def _cancel(self, request: Request) -> None:
        if request in self._new:
            self._new.remove(request)
        elif not request.is_finished:
            self._cancelled.append(request.request_id)

    def _take_cancelled(self) -> tuple[int, ...]:
        cancelled, self._cancelled = tuple(self._cancelled), []
        return cancelled

    # ---- steps ----

    def _lead(self, ops: StepOps) -> None:
        try:
            result = self._core.lead(ops, self._sinks())
        except BaseException as error:
            # The step did not end, so the ranks are out of step.
            blamed = self._fail(error, self._core.world)
            if blamed is error:
                raise
            raise blamed from error
        for request, token_id in result.tokens:
            generation = self._generations.get(request.request_id)
            if generation is None or generation.finished or token_id < 0:
                continue
            generation.add_token(token_id)
            if generation.finished and not request.is_finished:
                self._cancelled.append(request.request_id)
        for request in result.finished:
            generation = self._generations.get(request.request_id)
            if generation is not None and request.finish_reason is not None:
                generation.finish(request.finish_reason, request.error)

    def _sinks(self) -> StepSinks:
        def draw(logits_RV: Tensor, items: Sequence[StepItem]) -> list[int]:
            return sample_batch(sample, logits_RV, [self._generations[i.request.request_id] for i in items])

        def collect(item: StepItem, first: int, logits_RV: Tensor) -> None:
            self._generations[item.request.request_id].add_logits(first, logits_RV)

        def numbers(item: StepItem) -> Sequence[float]:
            return self._generations[item.request.request_id].row.numbers(item.request.num_outputs)

        return StepSinks(numbers, draw, collect, self._tap)


class Stream(Iterator[Piece]):
    """Iterator over the pieces of one generation; `output` gives the whole once the last piece came."""

    def __init__(self, pieces: Generator[Piece, None, None], generation: Generation) -> None:
        self._pieces = pieces
        self._generation = generation

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Cancel the generation where it still runs."""
        self._pieces.close()

    def output(self) -> Output:
        """The finished generation; raises ValueError before its end."""
        return self._generation.output()


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt (text, token ids or chat messages) or several -> a list of prompts."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and isinstance(prompts[0], (int, Mapping)):
        return [prompts]
    return list(prompts)


def prompts_of_every_size(chunk: int, longest: int, buckets: Sequence[int]) -> Iterator[list[int]]:
    """Lengths of prompts to run together, such that steps of prompts meet every way in which they are cut.

    Kernels are cut by the tokens of a step and by the tokens that a sequence has on average. So: a prompt of each power
    of two up to `chunk` alone, and one of several chunks beside every number of running requests.
    """
    for exponent in range(1, chunk.bit_length()):
        yield [min(1 << exponent, longest)]
    for size in buckets:
        yield [1] * (size - 1) + [min(3 * chunk, longest)]


def _params_for(prompts: Sequence[Prompt], params: Any) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    each = list(params)
    if len(each) != len(prompts):
        raise RequestError(f"params: {len(each)} SamplingParams for {len(prompts)} prompts; give one, or one a prompt")
    return each

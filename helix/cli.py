"""The `helix` command. Every command takes ``--config FILE``, ``--set key.path=value`` and ``--json``.

The scripts under launch/ call the same commands under the `deepspeed` launcher. Errors raised on purpose are printed as
one message without a traceback (``--debug``, anywhere, shows it), on the first rank of each node only.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from helix.bench.command import bench_app
from helix.config import RunConfig, launch_env, load_config
from helix.errors import ConfigError, HelixError
from helix.options import ConfigOption, JsonOption, SetOption

if TYPE_CHECKING:
    from helix.engine.engine import Engine
    from helix.engine.jsonl import Counts
    from helix.engine.outputs import Output
    from helix.engine.sampling import SamplingParams
    from helix.verify import Report

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None
)

PromptOption = Annotated[
    list[str] | None, typer.Option("--prompt", help="Prompt text. Repeatable. A model card takes --prompt-ids only.")
]
PromptIdsOption = Annotated[
    list[str] | None, typer.Option("--prompt-ids", help="Prompt as token ids: 1,2,3. Repeatable.")
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the `helix` script and of the scripts under launch/."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [argument for argument in given if argument != "--debug"]
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False, show_time=False)],
    )
    if not debug:
        for noisy in ("DeepSpeed", "torch", "transformers", "httpx", "httpx2"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        app(given, standalone_mode=True)
    except HelixError as error:
        if debug:
            traceback.print_exc()
        if _speaks():
            print(f"helix: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if _speaks():
            print("helix: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)


def _speaks() -> bool:
    """Whether this process prints errors: every rank of a node meets the same ones, so its first rank is enough."""
    try:
        env = launch_env()
    except ConfigError:
        return True
    return env is None or env.local_rank == 0


@app.command()
def generate(
    config: ConfigOption,
    prompt: PromptOption = None,
    prompt_ids: PromptIdsOption = None,
    raw: Annotated[bool, typer.Option(help="Continue the text instead of answering it as a chat message.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop string. Repeatable.")] = None,
    input_: Annotated[Path | None, typer.Option("--input", help="File of prompts, one JSON value a line.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the answers are appended; a run goes on there.")] = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Answer prompts; one prompt is streamed as its tokens come, several are batched, a file is gone through."""
    from helix.engine.sampling import SamplingParams

    run = load_config(config, set_ or [])
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    if input_ is not None or output is not None:
        if input_ is None or output is None or prompt or prompt_ids:
            raise ConfigError("--input FILE and --output FILE go together, and without --prompt and --prompt-ids")
        _answer_file(run, input_, output, params, raw, json_)
        return
    ids = _parse_ids(prompt_ids)
    texts = prompt or ([] if ids else [sys.stdin.read()])
    with _open_engine(run) as engine:
        chat = not raw and engine.has_chat_template
        prompts: list[Any] = [[{"role": "user", "content": text}] if chat else text for text in texts]
        prompts += ids
        if len(prompts) == 1 and not json_:
            _print_stream(engine, prompts[0], params)
        else:
            _print_outputs(engine.generate(prompts, params), engine, json_)


def _answer_file(run: RunConfig, source: Path, target: Path, params: SamplingParams, raw: bool, as_json: bool) -> None:
    """Answer every line of `source` that has no answer in `target`; under the launcher rank 0 reads and writes."""
    from helix.engine import jsonl

    env = launch_env()
    if env is not None and env.rank != 0:
        _open_engine(run)
        return
    settings = jsonl.Settings(params, raw)
    answers = jsonl.Answers(target)
    try:
        counts = jsonl.check_answers(source, answers, settings)
        started = time.perf_counter()
        if counts.num_before < counts.num_lines or env is not None:  # the launcher's other ranks wait for an engine
            with _open_engine(run) as engine, _answer_bar(counts) as report:
                started = time.perf_counter()
                jsonl.FileRun(engine, settings, answers, counts, report).run(jsonl.read_lines(source))
    finally:
        answers.close()
    seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps({**asdict(counts), "seconds": seconds, "output": str(target)}))
        return
    print(
        f"{target}: {counts.num_lines} lines, {counts.num_before} answered before, {counts.num_answered} now, "
        f"{counts.num_errors} errors | {counts.num_tokens} tokens | {counts.num_tokens / seconds:.1f} tokens/s"
    )


@contextmanager
def _answer_bar(counts: Counts) -> Iterator[Callable[[Counts], None]]:
    """Called after each answer; draws a bar where someone is watching."""
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    state = TextColumn("{task.fields[errors]} errors, {task.fields[tokens]} tokens")
    console = Console(stderr=True)
    with Progress(*columns, state, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=counts.num_lines, completed=counts.num_before, errors=0, tokens=0)

        def report(now: Counts) -> None:
            done = now.num_before + now.num_answered + now.num_errors
            bar.update(task, completed=done, errors=now.num_errors, tokens=now.num_tokens)

        yield report


def _parse_ids(given: list[str] | None) -> list[list[int]]:
    """``1,2,3`` -> [1, 2, 3] for each given prompt."""
    try:
        return [[int(part) for part in text.split(",")] for text in given or ()]
    except ValueError as error:
        raise ConfigError(f"--prompt-ids: {error}; write whole numbers with commas, such as 1,2,3") from error


def _open_engine(run: RunConfig) -> Engine:
    """An engine for `run`, with a progress bar while it loads where someone is watching."""
    from helix.config import config_to_dict
    from helix.engine.engine import Engine

    env = launch_env()
    console = Console(stderr=True)
    if not console.is_terminal or (env is not None and env.rank != 0):
        return Engine(config_to_dict(run))
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[name]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, name="")
        return Engine(
            config_to_dict(run), progress=lambda name, num_bytes: bar.update(task, advance=num_bytes, name=name)
        )


def _print_stream(engine: Engine, prompt: Any, params: SamplingParams) -> None:
    generation = engine.stream(prompt, params)
    for piece in generation:
        if engine.tokenizer is not None:
            print(piece.text, end="", flush=True)
        elif piece.token_id is not None:
            print(piece.token_id, end=" ", flush=True)
    print()
    print(_summary(engine, [generation.output()]), flush=True)


def _print_outputs(outputs: list[Output], engine: Engine, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"layout": str(engine.layout), "outputs": [asdict(one) for one in outputs]}))
        return
    for output in outputs:
        print(output.token_ids if engine.tokenizer is None else output.text)
        print("---")
    print(_summary(engine, outputs), flush=True)


def _summary(engine: Engine, outputs: list[Output]) -> str:
    tokens = sum(one.timing.num_tokens for one in outputs)
    total = max(one.timing.total_s for one in outputs)
    first = min(one.timing.first_token_s for one in outputs)
    ttl = sum(one.timing.ttl_s for one in outputs) / len(outputs)
    return (
        f"layout {engine.layout} | {tokens} tokens | time to first token {first * 1e3:.0f} ms | "
        f"TTL {ttl * 1e3:.1f} ms | {tokens / total if total else 0.0:.1f} tokens/s"
    )


@app.command()
def serve(config: ConfigOption, set_: SetOption = None) -> None:
    """Serve the OpenAI API over HTTP until SIGTERM or Ctrl-C, which let running requests finish."""
    run = load_config(config, set_ or [])
    try:
        from helix.server.run import serve as run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"helix serve needs {error.name}: pip install 'helix-parallel[serve]'") from error
    run_server(run, _open_engine)


@app.command()
def check(
    config: ConfigOption,
    num_ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks to check for (default: kvp x tpa).")] = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Validate a config and print its layout, groups, bytes a rank and capacity. Starts nothing, reads no weights."""
    from helix.check import check as run_check

    found = run_check(load_config(config, set_ or []), num_ranks)
    if json_:
        fields = {name: getattr(found, name) for name in found.__dataclass_fields__ if name not in ("spec", "layout")}
        fields["parameters"] = asdict(found.parameters)
        print(json.dumps({"layout": asdict(found.layout), "groups": found.groups(), **fields}))
        return
    console = Console()
    spec = found.spec
    kv_heads = "1 latent KV head" if spec.mla else f"{spec.num_kv_heads} KV heads"
    console.print(
        f"{spec.model_type}: {_billions(found.parameters.total)} parameters, {spec.num_layers} layers, "
        f"{spec.num_heads} query heads, {kv_heads}, {found.dtype}"
    )
    console.print(f"layout {found.layout} on {found.layout.num_ranks} ranks, {found.padded_heads} padded query heads")
    table = Table("axis", "groups of ranks")
    for axis, groups in found.groups().items():
        table.add_row(axis, " ".join(str(list(ranks)) for ranks in groups))
    console.print(table)
    low, high = min(found.weights_bytes), max(found.weights_bytes)
    scales = f", {_bytes(found.scale_bytes)} of them scales" if found.scale_bytes else ""
    console.print(
        f"weights a rank   {_bytes(high)}"
        + (f" (smallest {_bytes(low)})" if low != high else "")
        + f", layers in {found.weights_format}{scales}"
    )
    console.print(
        f"KV a rank        {found.kv_bytes_per_token:.0f} B for each token of a sequence, in {found.cache_format}"
    )
    if found.num_page_rows is None:
        console.print(f"capacity         unknown here: {found.page_rows_from}")
    else:
        console.print(
            f"capacity         {found.capacity_tokens} tokens: {found.num_page_rows} page rows "
            f"(from {found.page_rows_from}), "
            f"{_bytes(found.num_page_rows * found.page_row_bytes)} a rank"
        )
    console.print(f"longest context  {found.max_context} tokens")
    cut = ", ".join(f"{chunks} chunks at batch {size}" for size, chunks in found.chunks.items() if chunks > 1)
    console.print(f"overlap          {cut or 'lockstep at every batch'} (at the longest context, on this machine)")


@app.command()
def plan(
    model: Annotated[str | None, typer.Option(help="A model card or a checkpoint directory.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file: its model, and where it stands.")] = None,
    hardware: Annotated[str, typer.Option(help="A hardware card or a .yaml file.")] = "h200-sxm",
    gpus: Annotated[str | None, typer.Option(help="Number of GPUs; several with commas. Default 8.")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of each sequence, also 128K or 1M (default).")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences that decode together.")] = None,
    ttl_ms: Annotated[float | None, typer.Option(help="Longest time of a decode step.")] = None,
    objective: Annotated[str, typer.Option(help="ttl, throughput or concurrency.")] = "ttl",
    weights: Annotated[
        str, typer.Option(help="Number format of the weights: auto, unquantised, bfloat16, fp8, float4 ...")
    ] = "auto",
    cache: Annotated[str, typer.Option(help="Number format of the KV cache: auto, bfloat16, fp8 ...")] = "auto",
    page_tokens: Annotated[int | None, typer.Option(help="Tokens of a page. Default 64.")] = None,
    transport: Annotated[
        str, typer.Option(help="auto, collective or symmetric (memory of peers, inside a node).")
    ] = "auto",
    rows: Annotated[int, typer.Option(help="Helix layouts to show.")] = 12,
    show_groups: Annotated[bool, typer.Option("--show-groups", help="Ranks, groups and traffic of the best.")] = False,
    all_refused: Annotated[bool, typer.Option("--all-refused", help="Every reason for a refusal.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (png, svg, pdf).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the pictures and the table.")] = None,
    reproduce: Annotated[
        str | None, typer.Option(help="Results beside the model: helix-paper, vllm-dcp, vllm-h200, helix-h200.")
    ] = None,
    yaml_: Annotated[bool, typer.Option("--yaml", help="Print a ready config of the best layout.")] = False,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Price every layout on some GPUs, and those of other engines; say which to use, why, and when not."""
    from helix.planner import command, options

    if reproduce is not None:
        command.run_reproduction(reproduce, as_json=json_)
        return
    command.run_plan(
        options.PlanOptions(
            model=model,
            hardware=hardware,
            gpus=gpus,
            context=context,
            batch=batch,
            ttl_ms=ttl_ms,
            objective=objective,
            weights=weights,
            cache=cache,
            page_tokens=page_tokens,
            transport=transport,
            rows=rows,
            output="yaml" if yaml_ else "json" if json_ else "text",
            show_groups=show_groups,
            all_refused=all_refused,
            plot=plot,
            html=html,
        ),
        None if config is None else load_config(config, set_ or []),
    )


@app.command()
def calibrate(
    ranks: Annotated[int, typer.Option(help="Ranks to start here; under the launcher its ranks are taken.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    hardware: Annotated[str | None, typer.Option(help="Card that gives the datasheet values.")] = None,
    output: Annotated[Path, typer.Option(help="Where the hardware card goes.")] = Path("hardware.yaml"),
    json_: JsonOption = False,
) -> None:
    """Measure this machine and write a hardware card for `helix plan --hardware FILE`."""
    from helix.calibrate import calibrate as run_calibrate
    from helix.calibrate import report_rows, to_card, write_card

    found = run_calibrate(ranks, device, hardware)
    if found is None:
        return
    write_card(found, output)
    if json_:
        print(json.dumps({"output": str(output), "card": to_card(found), "measured": report_rows(found)}))
        return
    table = Table("what", "achieved", "datasheet", "share", title=f"{found.device}, {found.num_ranks} ranks")
    for row in report_rows(found):
        table.add_row(*row)
    Console(width=120).print(table)
    print(f"written to {output}; use it with: helix plan --hardware {output}")


app.add_typer(
    bench_app, name="bench", help="Time parts of a run on this machine; each prints a table, and one JSON line last."
)


@app.command()
def models(json_: JsonOption = False) -> None:
    """List the model cards: parameters, KV cache, heads, and how many legal layouts each has on 8, 16 and 64 GPUs."""
    from helix.models import survey

    found = survey()
    if json_:
        print(json.dumps({"models": [asdict(one) for one in found]}))
        return
    table = Table("card", "parameters", "active", "layers", "Q heads", "KV heads", "KV B/token", box=box.SIMPLE)
    for layouts in found[0].layouts:
        table.add_column(f"{layouts.num_ranks} GPUs")
    for one in found:
        table.add_row(
            one.card,
            _billions(one.parameters),
            _billions(one.active_parameters),
            str(one.num_layers),
            str(one.num_query_heads),
            "1 latent" if one.latent else str(one.num_kv_heads),
            str(one.kv_bytes_per_token),
            *(f"{layouts.count}: {layouts.example_text}" for layouts in one.layouts),
        )
    # Wide enough for the whole table: squeezed into a narrow terminal or a pipe it could not be read.
    Console(width=160).print(table)
    print("parameters: without layers for multi-token prediction; active: of them, those that one token uses")
    print("KV B/token: bytes of KV cache for a token in bf16, over all layers and KV heads")
    print("GPUs: number of legal layouts, and one to begin with, as kvp x tpa|tpf x ep (helix plan prices them all)")


@app.command()
def verify(
    config: ConfigOption,
    prompt: PromptOption = None,
    prompt_ids: PromptIdsOption = None,
    num_tokens: Annotated[int, typer.Option("--tokens", help="Greedy tokens compared for each prompt.")] = 32,
    tolerance: Annotated[float | None, typer.Option(help="Bound on a logit's absolute error.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text file on which the cost of FP8 is measured.")] = None,
    text_tokens: Annotated[int, typer.Option(min=2, help="Tokens of it that are used.")] = 2048,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Compare the configured layout with one unsharded rank on the same weights; exit code 1 where they differ."""
    from helix.verify import verify as run_verify

    run = load_config(config, set_ or [])
    prompts: list[str | list[int]] = [*(prompt or ()), *_parse_ids(prompt_ids)]
    words = None if text is None else text.read_text(encoding="utf-8")
    report = run_verify(run, prompts or None, num_tokens, tolerance, words, text_tokens)
    if json_:
        print(json.dumps({**asdict(report), "exact": report.exact, "first_layer": report.first_layer}))
    else:
        _print_report(report)
    if not (report.exact and (report.accuracy is None or report.accuracy.close)):
        raise typer.Exit(1)


def _print_report(report: Report) -> None:
    table = Table("prompt tokens", "max |error|", "mean |error|", "equal greedy tokens", "first layer that differs")
    for one in report.prompts:
        layer = "none" if one.first_layer is None else "embedding" if one.first_layer < 0 else str(one.first_layer)
        table.add_row(
            str(one.num_tokens),
            f"{one.max_error:.2e}",
            f"{one.mean_error:.2e}",
            f"{one.equal_tokens}/{one.checked_tokens}",
            layer,
        )
    Console().print(table)
    verdict = "exact" if report.exact else "DIFFERS"
    print(
        f"{verdict}: layout {report.layout} against one rank, {report.dtype}, max error {report.max_error:.2e}, "
        f"tolerance {report.tolerance:.0e}"
    )
    cost = report.accuracy
    if cost is not None:
        print(
            f"{'close' if cost.close else 'FAR'}: FP8 against {report.dtype} on {cost.num_tokens} tokens: mean KL "
            f"{cost.mean_divergence:.2e} (bound {cost.bound:.0e}), largest {cost.max_divergence:.2e}, same first token "
            f"{cost.same_top:.1%}, perplexity {cost.perplexity:.4g} against {cost.reference_perplexity:.4g}"
        )


def _billions(count: int) -> str:
    return f"{count / 1e9:.4g}B"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"

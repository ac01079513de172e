"""`helix bench`: one subcommand a module of this package, from the words of a command line to its report.

Nothing here imports torch before a subcommand runs. Every subcommand prints a table for people (not with ``--json``)
and one JSON object as its last line.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from helix.config import RunConfig, config_to_dict, load_config, make_config, parse_overrides
from helix.errors import ConfigError
from helix.options import JsonOption, SetOption

bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

RunOption = Annotated[Path | None, typer.Option("--config", help="YAML file of the run.")]
CardOption = Annotated[str | None, typer.Option(help="A model card instead, with random weights.")]

LayoutsOption = Annotated[
    str | None,
    typer.Option(
        help="Layouts on real ranks, in one run: 'kvp=2;tp=2;dcp=2,merge=ag_rs'. tp copies KV as plain TP does."
    ),
]
OneRankOption = Annotated[
    str | None,
    typer.Option(help="Time one rank's true share of these layouts on this device alone: 'kvp=8,ep=8;tp=8,ep=8'."),
]
PlotOption = Annotated[Path | None, typer.Option(help="Write a picture of measured, ceiling and predicted (png, svg).")]


def read_run(command: str, config: Path | None, card: str | None, overrides: list[str] | None) -> RunConfig:
    """The run that ``--config FILE`` or ``--card NAME`` means, with the ``--set`` overrides. Raises: ConfigError."""
    if (config is None) == (card is None):
        raise ConfigError(f"helix bench {command} needs one of --config FILE and --card NAME")
    if config is not None:
        return load_config(config, overrides or [])
    return make_config({"model": {"card": card, "load": "dummy"}}, **parse_overrides(overrides or []))


@bench_app.command("decode")
def bench_decode(
    config: RunOption = None,
    card: CardOption = None,
    batch: Annotated[str, typer.Option(help="Sequences that decode together; several with commas.")] = "1,8",
    context: Annotated[str, typer.Option(help="Tokens of each in the cache, also 128K or 1M.")] = "32K,128K",
    cells: Annotated[str | None, typer.Option(help="Single pairs instead of all: 1x1M,8x128K.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps timed in each cell.")] = 64,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 8,
    same_token: Annotated[bool, typer.Option(help="Feed all sequences the same token: few experts are hit.")] = False,
    layouts: LayoutsOption = None,
    one_rank_of: OneRankOption = None,
    whole_from: Annotated[
        int | None,
        typer.Option(min=1, help="Of a model cut by model.num_layers: time so many layers too, and scale to all."),
    ] = None,
    plot: PlotOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace of a few steps, one file a rank (chrome://tracing, Perfetto)."),
    ] = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Time decode steps over batch x context, on a cache filled with random numbers: no prompt is computed."""
    run = read_run("decode", config, card, set_)
    from helix.bench import decode, picture
    from helix.planner.command import read_tokens

    if cells is None:
        pairs = [(one, other) for one in batch.split(",") for other in context.split(",")]
    else:
        pairs = [(one, other) for one, _, other in (text.partition("x") for text in cells.split(","))]
    chosen = [
        decode.Cell(batch=read_tokens(one, "--batch"), context=read_tokens(other, "--context")) for one, other in pairs
    ]
    report = decode.bench_decode(
        run,
        chosen,
        steps=steps,
        warmup=warmup,
        same_token=same_token,
        layouts=layouts,
        one_rank_of=one_rank_of,
        whole_from=whole_from,
        trace=trace,
    )
    if report is not None:
        decode.print_report(report, as_json=json_)
        if plot is not None:
            picture.write_decode(report, plot)


@bench_app.command("kernel")
def bench_kernel(
    families: Annotated[str | None, typer.Option(help="Only the families whose names contain this text.")] = None,
    json_: JsonOption = False,
) -> None:
    """Time the kernels alone on this GPU: share of the memory's or the arithmetic's ceiling over a grid of shapes."""
    from helix.bench import kernels

    kernels.print_report(kernels.bench_kernels(families), as_json=json_)


@bench_app.command("prefill")
def bench_prefill(
    config: RunOption = None,
    card: CardOption = None,
    prompt: Annotated[str, typer.Option(help="Tokens of the prompt, also 128K; several with commas.")] = "32K",
    chunk: Annotated[str, typer.Option(help="Tokens of a chunk; several with commas.")] = "2K,8K",
    sample: Annotated[
        int | None, typer.Option(min=2, help="Time only so many chunks, spread over the prompt (default: all).")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each chunk is run, after one that warms up.")] = 1,
    layouts: LayoutsOption = None,
    one_rank_of: OneRankOption = None,
    plot: PlotOption = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Time a prompt to its first token, in chunks, over layouts."""
    run = read_run("prefill", config, card, set_)
    from helix.bench import picture, prefill
    from helix.planner.command import read_tokens

    cells = [
        prefill.Cell(prompt=read_tokens(one, "--prompt"), chunk=read_tokens(other, "--chunk"))
        for one in prompt.split(",")
        for other in chunk.split(",")
    ]
    report = prefill.bench_prefill(run, cells, sample=sample, repeats=repeats, layouts=layouts, one_rank_of=one_rank_of)
    if report is not None:
        prefill.print_report(report, as_json=json_)
        if plot is not None:
            picture.write_prefill(report, plot)


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str | None, typer.Option(help="A running server: http://HOST:PORT/v1.")] = None,
    config: RunOption = None,
    card: CardOption = None,
    model: Annotated[str | None, typer.Option(help="Name of the model (default: the server's first).")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key of the server.")] = None,
    concurrency: Annotated[str, typer.Option(help="Clients that each wait for their answer; several: 1,8,32.")] = "1,8",
    rate: Annotated[str | None, typer.Option(help="Requests a second at random times instead; several: 0.5,2.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 64,
    prompt_tokens: Annotated[str, typer.Option(help="Tokens of each prompt, also 128K.")] = "512",
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    shared_tokens: Annotated[str, typer.Option(help="Tokens that all prompts begin with.")] = "0",
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts are random token ids below it.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Time to first token, TTL and throughput of a server under streamed load; with --config, of one started here."""
    from helix.bench import serve
    from helix.planner.command import read_tokens

    prompt, shared = read_tokens(prompt_tokens, "--prompt-tokens"), 0
    if shared_tokens != "0":
        shared = read_tokens(shared_tokens, "--shared-tokens")
    if shared > prompt:
        raise ConfigError(f"--shared-tokens={shared} is more than --prompt-tokens={prompt}")
    sizes = {"num_requests": requests, "prompt_tokens": prompt, "output_tokens": output_tokens, "shared_tokens": shared}
    if rate is None:
        loads = [serve.Load(concurrency=one, **sizes) for one in _numbers("--concurrency", concurrency, int)]
    else:
        loads = [serve.Load(rate=one, **sizes) for one in _numbers("--rate", rate, float)]
    options: dict[str, int] = {"vocab_size": vocab_size, "seed": seed}
    if url is not None:
        if config is not None or card is not None or set_:
            raise ConfigError("--url is a server that runs already: leave out --config, --card and --set")
        found = serve.bench_serve(serve.make_client(url, api_key), model, loads, **options)
        serve.print_report(found, {"url": url}, as_json=json_)
        return
    run = read_run("serve", config, card, set_)
    with serve.own_server(run) as own_url:
        found = serve.bench_serve(serve.make_client(own_url, run.server.api_key), model, loads, **options)
    serve.print_report(found, {"config": config_to_dict(run) | {"server": {}}}, as_json=json_)


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """``1,8`` -> [1, 8]. Raises: ConfigError where one is no number above 0."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option}={text}: {error}; write numbers with commas, such as 1,8") from error
    if min(numbers) <= 0 or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{option}={text}: every number must be above 0")
    return numbers


@bench_app.command("exchange")
def bench_exchange(
    ranks: Annotated[int | None, typer.Option(help="Ranks to start here; under a launcher, its own.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_: JsonOption = False,
) -> None:
    """Time the exchange and all-reduces by transport and size on real ranks: messages, and peers' memory."""
    from helix.bench import exchange

    report = exchange.bench_exchange(ranks, device)
    if report is not None:
        exchange.print_report(report, as_json=json_)

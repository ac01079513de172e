"""`helix plan`: from the words of a command line to a `Question`, its plan, and what is printed or written."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from helix.config import AUTO_TRANSPORT, RunConfig
from helix.cost.choices import make_formats
from helix.cost.hardware import Transport, load_hardware
from helix.errors import ConfigError
from helix.model_spec import ModelSpec
from helix.planner.candidates import Candidate
from helix.planner.explain import explain
from helix.planner.groups import map_groups
from helix.planner.options import PlanOptions
from helix.planner.own import options_from, own_text
from helix.planner.render import plan_to_dict, plan_to_yaml, print_groups, print_plan, print_reproduction
from helix.planner.reproduce import reproduce
from helix.planner.search import Objective, Plan, Question, make_plan
from helix.planner.search import Progress as Report
from model_zoo import load_spec
from model_zoo.cards import load_card

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BAR_AFTER_S = 1.0
# What is asked where neither the command line nor a config says it.
_GPUS, _CONTEXT, _PAGE_TOKENS = "8", "1M", 64
_SUFFIXES = (".png", ".svg", ".pdf")
_ALIASES = {"fp8": "float8", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp4": "float4"}


def run_plan(options: PlanOptions, config: RunConfig | None = None) -> None:
    """Make the plan and print or write what `options` asks for; `config` says what they do not. Raises: ConfigError."""
    check_outputs(options)
    if config is not None:
        options = options_from(config, options)
    question = make_question(options)
    with progress_bar("planning") as report:
        plan = make_plan(question, report)
    why = explain(plan)
    if options.output == "yaml":
        print(plan_to_yaml(plan), end="")
    elif options.output == "json":
        tree = plan_to_dict(plan, why) | ({} if config is None else {"own": own_text(plan, config)})
        if options.show_groups:
            shown = _shown(plan)
            tree["groups"] = asdict(map_groups(question, shown.placement, plan.winner.cost.batch))
        print(json.dumps(tree))
    else:
        own = None if config is None else own_text(plan, config)
        print_plan(plan, why, own=own, rows=options.rows, all_refused=options.all_refused)
        if options.show_groups:
            print_groups(map_groups(question, _shown(plan).placement, plan.winner.cost.batch))
    _write_pictures(options, plan)


def check_outputs(options: PlanOptions) -> None:
    """Before anything is priced: pictures can be written where they are to go. Raises: ConfigError."""
    if options.plot is not None and options.plot.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {options.plot} must end in one of {', '.join(_SUFFIXES)}")
    for name, path in (("--plot", options.plot), ("--html", options.html)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{name} {path}: there is no folder {path.parent}")


def _shown(plan: Plan) -> Candidate:
    """The best Helix layout: the one whose groups are shown."""
    best = plan.best_of("helix")
    if best is None:
        raise ConfigError("--show-groups: no Helix layout fits, so there are no groups to show")
    return best.candidate


def _write_pictures(options: PlanOptions, plan: Plan) -> None:
    if options.plot is None and options.html is None:
        return
    # Needs matplotlib, an optional extra.
    from helix.planner import picture

    with progress_bar("drawing") as report:
        fronts = picture.find_fronts(plan, report)
    if options.plot is not None:
        picture.write_plot(fronts, options.plot, groups=options.show_groups)
    if options.html is not None:
        picture.write_html(fronts, options.html, groups=options.show_groups)


def make_question(options: PlanOptions) -> Question:
    """`options` read and checked."""
    if options.objective not in ("ttl", "throughput", "concurrency"):
        raise ConfigError(f"--objective {options.objective!r} must be ttl, throughput or concurrency")
    if options.transport not in ("auto", "collective", "symmetric"):
        raise ConfigError(f"--transport {options.transport!r} must be auto, collective or symmetric")
    if options.model is None:
        raise ConfigError(
            "helix plan needs --model: a model card (`helix models` lists them) or a checkpoint directory; or --config"
        )
    spec, hardware = read_model(options.model), load_hardware(options.hardware)
    weights = _ALIASES.get(options.weights, options.weights)
    if weights == "unquantised":
        weights = spec.dtype
    if weights == "auto":
        # As the engine: FP8 weights stay FP8 on a device that has products for them.
        weights = "float8" if spec.fp8_block and "float8" in hardware.products else spec.dtype
    cache = None if options.cache == "auto" else _ALIASES.get(options.cache, options.cache)
    if options.batch is not None and options.batch < 1:
        raise ConfigError(f"--batch {options.batch} must be at least 1")
    if options.ttl_ms is not None and not options.ttl_ms > 0:
        raise ConfigError(f"--ttl-ms {options.ttl_ms} must be above 0")
    page_tokens = _PAGE_TOKENS if options.page_tokens is None else options.page_tokens
    if page_tokens < 1:
        raise ConfigError(f"--page-tokens {page_tokens} must be at least 1")
    hardware = load_hardware(options.hardware)
    return Question(
        model=options.model,
        spec=spec,
        hardware=hardware,
        num_gpus=read_gpus(options.gpus or _GPUS),
        context=read_tokens(options.context or _CONTEXT, "--context"),
        batch=options.batch,
        ttl_us=None if options.ttl_ms is None else options.ttl_ms * 1e3,
        objective=cast(Objective, options.objective),
        formats=make_formats(weights, cache, spec.dtype if weights == "float8" else None),
        page_tokens=page_tokens,
        transport=AUTO_TRANSPORT if options.transport == "auto" else cast(Transport, options.transport),
    )


def run_reproduction(name: str, *, as_json: bool) -> None:
    """Print a published result beside the model's. Raises: ConfigError."""
    with progress_bar("reproducing"):
        found = reproduce(name)
    if as_json:
        rows = [{**asdict(row), "error": row.error} for row in found.rows]
        print(json.dumps({**asdict(found), "rows": rows, "median_error": found.median_error}))
    else:
        print_reproduction(found)


def read_model(name: str) -> ModelSpec:
    """The spec of a checkpoint directory, or of the model card called `name`."""
    return load_spec(Path(name)) if Path(name).is_dir() or "/" in name else load_card(name)


def read_tokens(text: str, option: str) -> int:
    """``128K`` -> 131072, ``1M`` -> 1048576."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([KMG]?)", text.strip(), re.IGNORECASE)
    count = round(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if count < 1:
        raise ConfigError(f"{option} {text!r} must be a number of tokens, such as 131072, 128K or 1M")
    return count


def read_gpus(text: str) -> tuple[int, ...]:
    """``8,16,64`` -> (8, 16, 64)."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", part) and int(part) > 0 for part in parts):
        raise ConfigError(f"--gpus {text!r} must be numbers of GPUs with commas, such as 8 or 8,16,64 (at most 9999)")
    return tuple(dict.fromkeys(int(part) for part in parts))


@contextmanager
def progress_bar(what: str) -> Iterator[Report | None]:
    """Something to report progress to: a bar on a terminal that appears once a second has passed."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    start = time.monotonic()
    bar = Progress(
        TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total}"), console=console, transient=True
    )
    task = bar.add_task("", total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() - start > _BAR_AFTER_S:
            bar.start()

    try:
        yield report
    finally:
        bar.stop()

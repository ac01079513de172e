"""Golden plans, a line for each model card on hardware of interest; ``python -m tests.unit.golden_plans`` writes them.

A change of a hardware card, a model card or a formula is seen in the lines' difference, and is then looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from helix.cost.hardware import hardware_names
from helix.errors import ConfigError
from helix.planner.command import make_question
from helix.planner.options import PlanOptions
from helix.planner.search import Priced, make_plan
from model_zoo.cards import card_names

PATH = Path(__file__).parent / "golden_plans.txt"
# Models whose checkpoints are in FP8, or too large for a node otherwise.
_FP8 = ("deepseek-r1", "deepseek-v3", "kimi-k2", "llama-3.1-405b", "qwen3-235b-a22b")
_EVERYWHERE = ("deepseek-r1", "llama-3.1-405b")


def questions() -> Iterator[PlanOptions]:
    """Every model on a node of H200 and on a rack of GB200; two models on everything that there is a card for."""
    for model in card_names():
        weights = "float8" if model in _FP8 else "auto"
        for hardware, gpus, context in (("h200-sxm", "8", "128K"), ("gb200-nvl72", "64", "1M")):
            yield PlanOptions(
                model=model, hardware=hardware, gpus=gpus, context=context, batch=8, weights=weights, rows=1
            )
    for model in _EVERYWHERE:
        for hardware in hardware_names():
            if hardware not in ("h200-sxm", "gb200-nvl72"):
                gpus = "32" if hardware == "a100-80g" else "16"
                yield PlanOptions(
                    model=model, hardware=hardware, gpus=gpus, context="256K", batch=4, weights="float8", rows=1
                )


def line(options: PlanOptions) -> str:
    """The question, the best Helix layout, its step and where its time goes, and the best step of each rival, ms."""
    head = f"{options.model} {options.gpus}x{options.hardware} {options.context} b{options.batch}"
    try:
        plan = make_plan(make_question(options))
    except ConfigError as error:
        return f"{head} | {error}"
    best = plan.best_of("helix")
    others = [f"{one.candidate.scheme} {one.cost.ttl_ms:.3g}" for one in plan.ranked if one.candidate.scheme != "helix"]
    helix = "helix does not fit" if best is None else _text(best)
    return f"{head} | {helix} | {', '.join(others)} | {len(plan.refused)} refused"


def _text(one: Priced) -> str:
    parts = one.cost.parts
    kinds = {"read": parts.attention_read, "weights": parts.weight_read, "messages": parts.communication}
    shares = " ".join(f"{name} {us / 1e3:.3g}" for name, us in kinds.items())
    ways = f" ({one.candidate.choice_text})" if one.candidate.choice_text else ""
    return f"{one.candidate.label}{ways} {one.cost.ttl_ms:.3g}: {shares}, most {one.memory.largest_batch}"


def lines() -> list[str]:
    return [line(options) for options in questions()]


if __name__ == "__main__":
    PATH.write_text("\n".join(lines()) + "\n", encoding="utf-8")

"""A person's own config among the placements of a plan: what is asked follows from it, and where its layout stands."""

from __future__ import annotations

from dataclasses import replace

from helix.config import RunConfig
from helix.cost.choices import Placement
from helix.layout import Layout, layout_problem, with_defaults
from helix.planner.auto import choices_of
from helix.planner.candidates import Candidate, Scheme
from helix.planner.explain import tokens_text
from helix.planner.options import PlanOptions
from helix.planner.search import Plan, Priced, price, sort_key


def own_layout(config: RunConfig) -> Layout | None:
    """The layout that `config` asks for; None where it leaves that to the planner."""
    return None if config.layout == "auto" or not config.layout.sizes() else with_defaults(config.layout.sizes())


def options_from(config: RunConfig, options: PlanOptions) -> PlanOptions:
    """`options` where they were given, else what `config` says."""
    layout, context = own_layout(config), config.engine.max_context
    return replace(
        options,
        model=options.model or str(config.model.card or config.model.path),
        gpus=options.gpus or (None if layout is None else str(layout.num_ranks)),
        context=options.context or (None if context == "auto" else str(context)),
        weights=options.weights if options.weights != "auto" else _weights(config),
        cache=options.cache if options.cache != "auto" else config.cache.dtype,
        page_tokens=options.page_tokens or config.cache.page_tokens,
    )


def _weights(config: RunConfig) -> str:
    """The format of the weights that `config` asks for, in the words of ``--weights``."""
    if config.model.quantize == "fp8":
        return "float8"
    if config.model.quantize == "none" and config.model.dtype == "auto":
        return "unquantised"
    return config.model.dtype


def own_text(plan: Plan, config: RunConfig) -> str:
    """One sentence: where the layout of `config`, run as its `comm` section says, stands."""
    question, layout = plan.question, own_layout(config)
    if layout is None:
        return "The config leaves the layout to the planner."
    problem = layout_problem(question.spec, layout)
    if problem is not None:
        return f"The config's layout is refused: {problem}."
    if layout.num_ranks not in question.num_gpus:
        return f"The config's layout has {layout.num_ranks} ranks, which --gpus does not name."
    scheme: Scheme = "tp" if layout.duplicate_kv else "helix"
    choices = replace(choices_of(config.comm), transport=plan.winner.candidate.placement.choices.transport)
    own = price(question, Candidate(scheme, Placement(layout=layout, choices=choices)))
    if not isinstance(own, Priced):
        return f"The config's layout, {layout}, {own[1].reason}."
    ahead = [one for one in plan.ranked if sort_key(question, one) < sort_key(question, own)]
    where = "is the best here" if not ahead else f"has {len(ahead)} of {len(plan.ranked)} placements ahead of it"
    return (
        f"The config's layout, {layout}, {where}: {own.cost.ttl_ms:.2f} ms a step at batch {own.cost.batch} and "
        f"{tokens_text(question.context)} tokens, {own.cost.tokens_per_s_gpu:.2f} tokens/s a GPU."
    )

"""Variants of one run that are timed side by side: layouts, and the ways of exchanging, as short texts.

    kvp=8,ep=8                    a Helix layout; absent sizes follow from the number of ranks
    tp=8                          plain tensor parallelism: tpa=8, the KV heads copied where there are fewer
    dcp=8,merge=ag_rs             vLLM's form: TP ranks share the sequence, queries gathered (merge=a2a: its newer one)
    kvp=8,overlap=2               any key of the `comm` section

Several with semicolons. `tp` with `dcp` is vLLM's pair of flags: tp=8,dcp=4 gives tpa=2, kvp=4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helix.config import CommConfig, LaunchEnv, RunConfig, config_to_dict, make_config, parse_overrides
from helix.errors import ConfigError
from helix.layout import Layout, check_layout, with_defaults
from helix.model_spec import ModelSpec

_SIZES = ("kvp", "tpa", "tpf", "ep")
_AS_CONFIGURED = "config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run: its text, and the whole config with its layout. `one_rank`: rank 0 of it alone, no peers."""

    label: str
    config: RunConfig
    one_rank: bool = False

    def layout(self, spec: ModelSpec) -> Layout | None:
        """The checked layout; None for ``layout: auto``."""
        if self.config.layout == "auto":
            return None
        sizes = {name: value for name, value in self.config.layout.model_dump().items() if value is not None}
        layout = with_defaults(sizes)
        check_layout(spec, layout)
        return layout

    def num_processes(self, spec: ModelSpec, env: LaunchEnv | None) -> int:
        """Ranks that run. Raises: ConfigError where the launcher started another number."""
        started = 1 if env is None else env.world_size
        layout = None if self.one_rank else self.layout(spec)
        needed = 1 if self.one_rank else started if layout is None else layout.num_ranks
        if env is not None and needed != started:
            raise ConfigError(f"{self.label} runs on {needed} ranks, but the launcher started {started}")
        return needed


def read_variants(config: RunConfig, spec: ModelSpec, layouts: str | None, one_rank_of: str | None) -> list[Variant]:
    """The variants that ``--layouts`` and ``--one-rank-of`` name; without both the config as it is."""
    if layouts is None and one_rank_of is None:
        return [Variant(label=_AS_CONFIGURED, config=config)]
    found = [_variant(config, spec, text, one_rank=False) for text in _split(layouts)]
    return found + [_variant(config, spec, text, one_rank=True) for text in _split(one_rank_of)]


def _split(text: str | None) -> Sequence[str]:
    return [] if text is None else [part.strip() for part in text.split(";") if part.strip()]


def _variant(config: RunConfig, spec: ModelSpec, text: str, *, one_rank: bool) -> Variant:
    option = "--one-rank-of" if one_rank else "--layouts"
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip()
        known = (*_SIZES, "tp", "dcp", *CommConfig.model_fields)
        if not equals or key not in known:
            raise ConfigError(f"{option} {text!r}: {part!r} is not key=value with a key of {', '.join(known)}")
        given[key] = value.strip()
    try:
        sizes: dict[str, Any] = {name: int(given[name]) for name in _SIZES if name in given}
        rival: dict[str, int] = {name: int(given[name]) for name in ("tp", "dcp") if name in given}
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: sizes are whole numbers ({error})") from error
    named = [f"comm.{name}={value}" for name, value in given.items() if name in CommConfig.model_fields]
    comm: dict[str, Any] = parse_overrides(named).get("comm", {})
    if rival:
        if "kvp" in sizes or "tpa" in sizes:
            raise ConfigError(f"{option} {text!r}: tp and dcp stand for kvp and tpa; give one pair or the other")
        sizes |= _rival_sizes(spec, f"{option} {text!r}", rival)
        if rival.get("dcp", 1) > 1:
            comm = {"query": "gather", **comm}
    sections = config_to_dict(config)
    sections |= {"layout": sizes, "comm": sections["comm"] | comm}
    return Variant(label=text, config=make_config(sections), one_rank=one_rank)


def _rival_sizes(spec: ModelSpec, where: str, rival: dict[str, int]) -> dict[str, Any]:
    dcp = rival.get("dcp", 1)
    tp = rival.get("tp", dcp)
    if dcp < 1 or tp % dcp:
        raise ConfigError(f"{where}: dcp={dcp} must divide tp={tp}")
    if dcp == 1:
        return {"kvp": 1, "tpa": tp, "duplicate_kv": tp > spec.cache_heads}
    return {"kvp": dcp, "tpa": tp // dcp}


def series_name(label: str, layout: str, *, one_rank: bool) -> str:
    """What a table or a picture calls a variant."""
    if one_rank:
        return f"one rank of {label}"
    return layout if label == _AS_CONFIGURED else label

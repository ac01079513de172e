"""`Hardware`: what one device, its links and its kernels give, read from a YAML card. No torch.

A card keeps the datasheet value and the achieved share of it apart, each with its source, so that a reader sees which
numbers were measured and which are assumed. Units inside: bytes, floating-point operations, microseconds; so a rate is
in bytes or operations per microsecond.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import yaml

from helix.errors import ConfigError

Op: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
KernelKind: TypeAlias = Literal[
    "linear", "few_linear", "attention", "latent_attention", "experts", "few_experts", "small"
]
Transport: TypeAlias = Literal["collective", "symmetric"]

OPS: Final[tuple[Op, ...]] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_DIRECTORY: Final = Path(__file__).parent / "hardware_cards"
# Unit of a rate in a card -> factor to bytes (or operations) per microsecond.
_UNITS: Final[Mapping[str, float]] = {"tb_s": 1e6, "gb_s": 1e3, "tflops": 1e6}
# Kinds for steps of very few tokens, which have kernels of their own; a card without them prices them as the others.
_USUAL: Final[Mapping[KernelKind, KernelKind]] = {"few_linear": "linear", "few_experts": "experts"}
# Wider formats that can stand in for one a device has no products of.
_WIDER: Final[Mapping[str, str]] = {
    "float4": "float8",
    "nvfp4": "float4",
    "float8": "bfloat16",
    "float16": "bfloat16",
    "bfloat16": "float32",
}


@dataclass(frozen=True, slots=True)
class Rate:
    """A datasheet value (per microsecond) and the share of it that was reached; `source` says where both are from."""

    datasheet: float
    achieved: float
    source: str

    @property
    def value(self) -> float:
        return self.datasheet * self.achieved


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Time of one collective by the bytes that leave a rank, measured on `ranks` ranks.

    Between the points straight lines, before the first its time, after the last the link's bandwidth. Each doubling of
    the ranks adds `us_per_doubling`.
    """

    ranks: int
    sent_bytes: tuple[float, ...]
    us: tuple[float, ...]
    us_per_doubling: float
    source: str

    def time_us(self, sent_bytes: float, size: int, link: float) -> float:
        """Time for `size` ranks of one node; `link` is the achieved bandwidth in bytes per microsecond."""
        extra = self.us_per_doubling * max(math.log2(size / self.ranks), 0.0)
        at = bisect_right(self.sent_bytes, sent_bytes)
        if at == 0:
            return self.us[0] + extra
        if at == len(self.us):
            return self.us[-1] + (sent_bytes - self.sent_bytes[-1]) / link + extra
        left, right = self.sent_bytes[at - 1], self.sent_bytes[at]
        share = (sent_bytes - left) / (right - left)
        return self.us[at - 1] + share * (self.us[at] - self.us[at - 1]) + extra


@dataclass(frozen=True, slots=True)
class Kernel:
    """Cost of one launch of a kind of kernel: a fixed time, and the shares of the achieved rates that it reaches."""

    fixed_us: float
    bandwidth: float = 1.0
    products: float = 1.0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device and how it is linked. `products` holds dense matrix rates by format name.

    `chunks_share_latency` says that the chunks of an exchange pay its fixed latency once together, not once each. No
    real library does; the figures of the Helix paper assume it. `overlaps` says that messages can go on while the
    device computes (a CPU rank does one after the other). `small_launches`, by part of a layer, is given where the
    kernels are those of another engine, which fuses less or more.
    """

    name: str
    source: str
    memory_bytes: int
    reserved_bytes: int
    node_size: int
    memory: Rate
    products: Mapping[str, Rate]
    link: Rate
    internode: Rate
    internode_us: float
    collectives: Mapping[Op, CollectiveCurve]
    kernels: Mapping[str, Kernel]
    symmetric: Mapping[Op, CollectiveCurve] = field(default_factory=dict)
    layer_us: float = 0.0
    step_us: float = 0.0
    chunks_share_latency: bool = False
    small_launches: Mapping[str, int] = field(default_factory=dict)
    overlaps: bool = True
    device_names: tuple[str, ...] = ()

    def kernel(self, kind: KernelKind, number_format: str = "bfloat16") -> Kernel:
        """Cost of a launch of `kind` on weights in `number_format`: of the nearest entry that the card has.

        A card may hold ``linear_float8`` beside ``linear``, where kernels for that format differ in more than bytes.
        """
        usual = _USUAL.get(kind, kind)
        names = (f"{kind}_{number_format}", f"{usual}_{number_format}", kind, usual)
        return next(self.kernels[name] for name in names if name in self.kernels)

    def product_rate(self, number_format: str) -> float:
        """Achieved operations per microsecond in `number_format`, or in the next wider one the device has."""
        name = number_format
        while name not in self.products:
            if name not in _WIDER:
                raise ConfigError(
                    f"hardware {self.name} has no product rate for {number_format}; it has {', '.join(self.products)}"
                )
            name = _WIDER[name]
        return self.products[name].value

    def collective_us(self, op: Op, sent_bytes: float, span: Span, transport: Transport = "collective") -> float:
        """Time of one collective of a group that lies as `span` says. 0 for a group of one rank.

        Through peers' memory goes what is not larger than the largest message that was timed there, inside a node.
        Across nodes: the part inside a node, plus `internode_us` and the bytes that must pass each rank's network port.
        """
        if span.size == 1:
            return 0.0
        curve = self.collectives[op]
        direct = self.symmetric.get(op) if transport == "symmetric" and span.nodes == 1 else None
        if direct is not None and sent_bytes <= direct.sent_bytes[-1]:
            curve = direct
        if span.nodes == 1:
            return curve.time_us(sent_bytes, span.size, self.link.value)
        inside = curve.time_us(sent_bytes, span.size, self.link.value)
        return inside + self.internode_us + span.crossing_share(op) * sent_bytes / self.internode.value

    def scaled(self, *, bandwidth: float = 1.0, products: float = 1.0, link: float = 1.0) -> Hardware:
        """The same device with its memory, product and link rates multiplied."""

        def times(rate: Rate, factor: float) -> Rate:
            return replace(rate, datasheet=rate.datasheet * factor)

        return replace(
            self,
            memory=times(self.memory, bandwidth),
            products={name: times(rate, products) for name, rate in self.products.items()},
            link=times(self.link, link),
            internode=times(self.internode, link),
        )

    def ideal(self) -> Hardware:
        """The same device with kernels at its achieved rates, no fixed costs, and messages that take no time."""
        free = CollectiveCurve(2, (0.0,), (0.0,), 0.0, "ideal")
        return replace(
            self,
            kernels={kind: Kernel(0.0) for kind in self.kernels},
            collectives=dict.fromkeys(OPS, free),
            symmetric={},
            link=replace(self.link, datasheet=math.inf),
            internode=replace(self.internode, datasheet=math.inf),
            internode_us=0.0,
            layer_us=0.0,
            step_us=0.0,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """How the ranks of a group lie on nodes: `size` ranks on `nodes` nodes, at most `local` of them on one."""

    size: int
    nodes: int
    local: int

    def crossing_share(self, op: Op) -> float:
        """Part of a rank's sent bytes that passes its network port.

        An all-to-all sends each peer its own bytes. The others work in two levels, where the ranks of a node share what
        the node sends (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005).
        """
        if op == "all_to_all":
            return (self.size - self.local) / (self.size - 1)
        return 1.0 / self.local


@lru_cache(maxsize=4096)
def group_span(size: int, stride: int, num_ranks: int, node_size: int) -> Span:
    """The worst lying group among those of `size` ranks with `stride` between them, of `num_ranks` ranks in order."""
    worst = Span(size, 1, size)
    for base in range(0, num_ranks, size * stride):
        for first in range(base, base + stride):
            nodes = [rank // node_size for rank in range(first, first + size * stride, stride)]
            counts = [nodes.count(node) for node in set(nodes)]
            worst = max(worst, Span(size, len(counts), max(counts)), key=lambda span: (span.nodes, -span.local))
    return worst


def hardware_names() -> tuple[str, ...]:
    """Names that `--hardware` takes, sorted."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.yaml")))


def load_hardware(name: str) -> Hardware:
    """The card called `name`, or the card in the file `name`. Raises: ConfigError with the nearest names."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"hardware={name!r}: there is no such file")
        return parse_hardware(path.read_text(encoding="utf-8"), name)
    names = hardware_names()
    if name not in names:
        near = get_close_matches(name.lower(), names, n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"cards are {', '.join(names)}"
        raise ConfigError(f"hardware={name!r} is not a hardware card; {hint} (a card of your own: a .yaml file)")
    return _packaged(name)


@lru_cache(maxsize=64)
def _packaged(name: str) -> Hardware:
    return parse_hardware((_DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8"), name)


def recognise_hardware(device_name: str) -> str | None:
    """Name of the card for what the device calls itself, such as "NVIDIA H200"; None if no card knows it."""
    found = [
        (len(part), name)
        for name in hardware_names()
        for part in load_hardware(name).device_names
        if part.lower() in device_name.lower()
    ]
    return max(found)[1] if found else None  # "GB200" says more than "B200"


def parse_hardware(text: str, origin: str) -> Hardware:
    """`Hardware` from a card's YAML. Raises: ConfigError naming `origin` and the key."""
    try:
        card = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"hardware card {origin}: not valid YAML: {error}") from error
    if not isinstance(card, dict):
        raise ConfigError(f"hardware card {origin}: must be a mapping")
    try:
        return _hardware(_with_assumptions(card))
    except KeyError as error:
        raise ConfigError(f"hardware card {origin}: key {error} is missing") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"hardware card {origin}: {error}") from error


def _with_assumptions(card: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a card does not say, taken from the card it names in `assumed_from`, and said so in each source."""
    base_name = card.get("assumed_from")
    if base_name is None:
        return card
    base = yaml.safe_load((_DIRECTORY / f"{base_name}.yaml").read_text(encoding="utf-8"))
    rates = {}
    for name, fields in card.get("rates", {}).items():
        like = base["rates"].get(name, base["rates"]["bfloat16_tflops"])
        assumed = {"achieved": like["achieved"], "source": f"{fields['source']}; share assumed as on {base_name}"}
        rates[name] = fields if "achieved" in fields else {**fields, **assumed}
    source = f"{card['source']}; collectives and kernels assumed as on {base_name} where not given"
    return {**base, **card, "rates": rates, "source": source}


def _hardware(card: Mapping[str, Any]) -> Hardware:
    rates = {name: _rate(name, fields) for name, fields in card["rates"].items()}
    products = {name.removesuffix("_tflops"): rate for name, rate in rates.items() if name.endswith("_tflops")}
    link = rates["link_gb_s"]
    return Hardware(
        name=str(card["name"]),
        source=str(card["source"]),
        memory_bytes=round(card["memory_gb"] * 1e9),
        reserved_bytes=round(card["reserved_gb"] * 1e9),
        node_size=int(card["node_size"]),
        memory=rates["memory_tb_s"],
        products=products,
        link=link,
        internode=rates["internode_gb_s"],
        internode_us=float(card["internode_us"]),
        collectives=_curves(card["collectives"], required=True),
        kernels={kind: Kernel(**fields) for kind, fields in card["kernels"].items()},
        symmetric=_curves(card.get("symmetric", {}), required=False),
        layer_us=float(card.get("layer_us", 0.0)),
        step_us=float(card["step_us"]),
        chunks_share_latency=bool(card.get("chunks_share_latency", False)),
        small_launches={str(name): int(count) for name, count in card.get("small_launches", {}).items()},
        overlaps=bool(card.get("overlaps", True)),
        device_names=tuple(card.get("device_names", ())),
    )


def _rate(name: str, fields: Mapping[str, Any]) -> Rate:
    unit = next((factor for ending, factor in _UNITS.items() if name.endswith(ending)), None)
    if unit is None:
        raise ValueError(f"rates.{name} must end in one of {', '.join(_UNITS)}")
    rate = Rate(float(fields["datasheet"]) * unit, float(fields["achieved"]), str(fields["source"]))
    if rate.datasheet <= 0 or not 0 < rate.achieved <= 1.05:
        raise ValueError(f"rates.{name}: datasheet must be above 0 and achieved a share of it, from 0 to 1")
    return rate


def _curves(fields: Mapping[str, Any], *, required: bool) -> dict[Op, CollectiveCurve]:
    missing = [op for op in OPS if op not in fields]
    if required and missing:
        raise ValueError(f"collectives lack {', '.join(missing)}")
    return {op: _curve(op, fields[op]) for op in OPS if op in fields}


def _curve(op: Op, fields: Mapping[str, Any]) -> CollectiveCurve:
    """A curve whose points in the card are [KB of the rank's own buffer, microseconds]."""
    ranks = int(fields["ranks"])
    points = [(sent_bytes(op, ranks, float(kb) * 1e3), float(us)) for kb, us in fields["points"]]
    if points != sorted(points) or [us for _, us in points] != sorted(us for _, us in points):
        raise ValueError(f"collectives.{op}: points must rise in size and time")
    return CollectiveCurve(
        ranks,
        tuple(size for size, _ in points),
        tuple(us for _, us in points),
        float(fields["us_per_doubling"]),
        str(fields["source"]),
    )


def sent_bytes(op: Op, size: int, buffer_bytes: float) -> float:
    """Bytes that leave a rank in a collective over `size` ranks, by the rank's input buffer.

    The same rule as in `helix.comm.group`: two passes for an all-reduce, everything to each peer for an all-gather, one
    part in `size` to each peer for the others.
    """
    if op == "all_gather":
        return buffer_bytes * (size - 1)
    return (2 if op == "all_reduce" else 1) * buffer_bytes * (size - 1) / size

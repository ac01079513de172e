"""Random models, layouts and ways to run them, for property tests of the cost model against the engine."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from helix.cost.choices import Choices, Workload
from helix.layout import Layout, legal_layouts
from helix.model_spec import MLASpec, ModelSpec, MoESpec, RotarySpec


def dense_spec(**changes: object) -> ModelSpec:
    """The dense model of the Helix paper's figure 1."""
    fields: dict[str, object] = {
        "model_type": "llama",
        "num_layers": 1,
        "hidden_size": 16384,
        "num_heads": 128,
        "num_kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": 65536,
        "vocab_size": 128256,
        "max_context": 1 << 20,
        "norm_eps": 1e-5,
        "rotary": RotarySpec(theta=5e5, dim=128),
    }
    return ModelSpec(**(fields | changes))  # type: ignore[arg-type]


@st.composite
def specs(draw: st.DrawFn, scale: int = 32, max_experts: int = 64, max_layers: int = 4) -> ModelSpec:
    """Dense and sparse, grouped and latent attention, sizes that divide and sizes that do not, about `scale` wide."""
    kv = draw(st.sampled_from((1, 2, 3, 4, 8)))
    heads = kv * draw(st.sampled_from((1, 2, 3, 5, 8)))
    latent = draw(st.booleans())
    experts = draw(st.sampled_from((0, 0, 5, 8, max_experts)))
    moe = None
    if experts:
        moe = MoESpec(
            num_experts=experts,
            experts_per_token=draw(st.integers(1, min(experts, 4))),
            expert_width=draw(st.sampled_from((3 * scale + 4, 8 * scale))),
            shared_width=draw(st.sampled_from((0, 4 * scale + 2))),
            num_dense_layers=draw(st.integers(0, 2)),
        )
    mla = MLASpec(
        q_lora_rank=draw(st.sampled_from((None, 3 * scale))),
        kv_lora_rank=2 * scale,
        nope_dim=scale,
        rope_dim=scale // 2,
        v_dim=scale,
    )
    return dense_spec(
        num_layers=draw(st.integers(1, max_layers)),
        hidden_size=draw(st.sampled_from((6 * scale, 8 * scale))),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=scale,
        intermediate_size=draw(st.sampled_from((15 * scale + 20, 32 * scale))),
        vocab_size=draw(st.integers(50, 1000)),
        mla=mla if latent else None,
        moe=moe,
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()) and not latent,
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()) and moe is None,
        tie_embeddings=draw(st.booleans()),
        rotary=RotarySpec(theta=1e4, dim=scale // 2 if latent else scale),
    )


@st.composite
def cases(
    draw: st.DrawFn, models: st.SearchStrategy[ModelSpec] | None = None, max_ranks: int = 24
) -> tuple[ModelSpec, Layout]:
    """A model and a layout that is legal for it."""
    spec = draw(specs() if models is None else models)
    layouts = list(legal_layouts(spec, draw(st.integers(1, max_ranks))))
    assume(layouts)
    return spec, draw(st.sampled_from(layouts))


choices_ = st.builds(
    Choices,
    query=st.sampled_from(("replicate", "gather")),
    exchange_space=st.sampled_from(("latent", "value")),
    merge=st.sampled_from(("a2a", "ag_rs", "gather")),
    dispatch=st.sampled_from(("local", "alltoall")),
    overlap=st.sampled_from((1, 2, 4)),
)
# What the engine runs too, with a traffic that does not depend on the routing.
engine_choices = st.builds(
    Choices,
    query=st.sampled_from(("replicate", "gather")),
    exchange_space=st.sampled_from(("latent", "value")),
    merge=st.sampled_from(("a2a", "ag_rs")),
)
workloads = st.builds(
    Workload, batch=st.integers(1, 40), context=st.integers(1, 5000), page_tokens=st.sampled_from((1, 16, 64))
)

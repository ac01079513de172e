"""Operations on paged KV and partial attention results: one file per operation, each with a plain PyTorch twin.

Shape letters: T tokens of the step, S sequences, H query heads, K KV heads, D head width, P pages of the pool,
B page_tokens, R page rows of one sequence, Z partials to merge (the KVP ranks).
"""

from helix.kernels.append import append
from helix.kernels.attention import attend
from helix.kernels.merge import merge

__all__ = ["append", "attend", "merge"]

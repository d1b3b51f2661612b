"""What runs for each token: hybrid blocks, skip rules, predictors, tiers and the streaming cache."""

if __name__ != "hf_sparse.modeling":  # a second name would make a second copy of every class
    raise ImportError(f"this package is hf_sparse.modeling: install hf_sparse and import it so, not as {__name__!r}")

from .attention import HybridAttention
from .block import HybridBlock
from .cache import TieredCacheLayer
from .families import FAMILIES, family_of, has_exact_zeros, hybrid_blocks, swap_blocks
from .mlp import HybridMLP
from .neurons import BlockId, BlockKind, Placement, Tier, WeightFormat
from .predictor import Predictor
from .rules import Skipping, SkipRule, gives_exact_zeros, note_forward, rules_apply, skipping

__all__ = [
    "FAMILIES",
    "BlockId",
    "BlockKind",
    "HybridAttention",
    "HybridBlock",
    "HybridMLP",
    "Placement",
    "Predictor",
    "SkipRule",
    "Skipping",
    "Tier",
    "TieredCacheLayer",
    "WeightFormat",
    "family_of",
    "gives_exact_zeros",
    "has_exact_zeros",
    "hybrid_blocks",
    "note_forward",
    "rules_apply",
    "skipping",
    "swap_blocks",
]

"""What runs for each token: hybrid blocks, skip rules, predictors, tiers and the streaming cache."""

if __name__ != "hf_sparse.modeling":  # a second name would make a second copy of every class
    raise ImportError(f"this package is hf_sparse.modeling: install hf_sparse and import it so, not as {__name__!r}")

from .attention import HybridAttention
from .block import BlockShape, HybridBlock, Projection
from .cache import CacheStates, TieredCacheLayer
from .engine import Engine, NotUsual
from .families import FAMILIES, engine_of, family_of, has_exact_zeros, hybrid_blocks, swap_blocks
from .head import PackedHead, relative_error
from .homes import move, settle_layers, settle_part
from .mlp import HybridMLP
from .neurons import BlockId, BlockKind, Placement, Tier, WeightFormat
from .paged_cache import PagedCacheLayer, use_pages
from .predictor import Predictor
from .rotation import turn_exactly
from .rules import (
    Place,
    Skipping,
    SkipRule,
    gives_exact_zeros,
    magnitude,
    note_forward,
    rules_apply,
    skipping,
    skipping_mode,
)
from .streaming import StreamingLayer, StreamingOptions
from .streaming_cache import StreamingCache, max_positions, watch_passes
from .tiers import SimulatedTier, streams_weights

__all__ = [
    "FAMILIES",
    "BlockId",
    "BlockKind",
    "BlockShape",
    "CacheStates",
    "Engine",
    "HybridAttention",
    "HybridBlock",
    "HybridMLP",
    "NotUsual",
    "PackedHead",
    "PagedCacheLayer",
    "Place",
    "Placement",
    "Predictor",
    "Projection",
    "SimulatedTier",
    "SkipRule",
    "Skipping",
    "StreamingCache",
    "StreamingLayer",
    "StreamingOptions",
    "Tier",
    "TieredCacheLayer",
    "WeightFormat",
    "engine_of",
    "family_of",
    "gives_exact_zeros",
    "has_exact_zeros",
    "hybrid_blocks",
    "magnitude",
    "max_positions",
    "move",
    "note_forward",
    "relative_error",
    "rules_apply",
    "settle_layers",
    "settle_part",
    "skipping",
    "skipping_mode",
    "streams_weights",
    "swap_blocks",
    "turn_exactly",
    "use_pages",
    "watch_passes",
]

"""The bytes of one cache record of each kind. Imports no torch."""

from __future__ import annotations

MXFP8_GROUP = 32
FP4_GROUP = 16
INDEX_GROUP = 32


def window_bytes(head_dim: int) -> int:
    """Sliding-window or draft-context key: ``head_dim`` e4m3 values, then one UE8M0 scale per 32."""
    return head_dim + head_dim // MXFP8_GROUP


def compressed_bytes(head_dim: int) -> int:
    """Compressed key: ``head_dim`` e2m1 values, two to a byte, then one e4m3 scale per 16."""
    return head_dim // 2 + head_dim // FP4_GROUP


def index_key_bytes(index_head_dim: int) -> int:
    """Index key: ``index_head_dim`` e2m1 values, two to a byte, then one UE8M0 scale per 32."""
    return index_head_dim // 2 + index_head_dim // INDEX_GROUP


def compressor_bytes(head_dim: int) -> int:
    """Row waiting for its pair: ``head_dim`` fp32 gates, then ``head_dim`` fp32 latents."""
    return 2 * head_dim * 4

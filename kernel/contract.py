"""The contract's numbers: page geometry and limits. Imports nothing, so a client needs no torch for it."""

from __future__ import annotations

BLOCK_TOKENS = 128
"""Tokens in a block, and keys in a page."""
HEAD_DIM = 128
"""Values in an index query or key."""
GROUP_DIMS = 16
"""Dims that share one scale."""
GROUPS = HEAD_DIM // GROUP_DIMS
"""Scales of a token."""
TOKEN_CODE_BYTES = HEAD_DIM // 2
"""Bytes of a token's codes."""
CODE_BYTES = BLOCK_TOKENS * TOKEN_CODE_BYTES
"""Bytes of a page's codes; the scales start here."""
SCALE_BYTES = BLOCK_TOKENS * GROUPS
"""Bytes of a page's scales."""
PAGE_BYTES = CODE_BYTES + SCALE_BYTES
"""Bytes of a page: 9,216."""

SUPPORTED_HEADS = (1, 2, 4)
"""Index heads a rank may hold (MiniMax-M3 has 4; 2 and 1 remain at tensor parallel 2 and 4)."""
MAX_TOPK = 64
"""Most blocks a row may select."""
MAX_SEQ_LEN = 1 << 20
"""Longest context, tokens."""
MAX_SEQ_BLOCKS = MAX_SEQ_LEN // BLOCK_TOKENS
"""Blocks of the longest context."""

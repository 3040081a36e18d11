"""The numbers in which a training multiplies matrices: bf16 where the processor has instructions for it, else float32.

Without such instructions (AVX-512 BF16 or AMX) a product in bf16 takes five times as long as one in float32.
"""

from __future__ import annotations

import torch


def fast_dtype() -> torch.dtype:
    """Returns the type of numbers that this processor multiplies fastest."""
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has else torch.float32


COMPUTE_DTYPE = fast_dtype()


def lowered() -> torch.autocast:
    """Returns a context in which the layers of torch multiply in COMPUTE_DTYPE."""
    return torch.autocast("cpu", torch.bfloat16, enabled=COMPUTE_DTYPE is torch.bfloat16)

"""The parts that a model is made of, free of any family's own names.

What differs only in numbers is a tensor of the pack, what may be absent is None, and where a part may be one of several
they carry a kind. Each part says which tensors it has, and what about it contradicts itself. All matrices are stored
[out_features, in_features].
"""

from moert.pack.parts.attention import MOST_TURN, Attention, Buckets, Latent, Rope, Stretch
from moert.pack.parts.base import ROLES, Norm, Role, Tensor
from moert.pack.parts.feed_forward import Act, Beside, Experts, Ffn, Groups, Narrow, Router
from moert.pack.parts.layers import MOST_LAYERS, Join, Layer, Stack, stack_of
from moert.pack.parts.mixers import FixedState, GatedDelta, Mamba, Mamba2, ShortConv
from moert.pack.parts.positions import PositionTable

__all__ = [
    "MOST_LAYERS", "MOST_TURN", "ROLES", "Act", "Attention", "Beside", "Buckets", "Experts", "Ffn", "FixedState",
    "GatedDelta", "Groups", "Join", "Latent", "Layer", "Mamba", "Mamba2", "Narrow", "Norm", "PositionTable", "Role",
    "Rope", "Router", "ShortConv", "Stack", "Stretch", "Tensor", "stack_of",
]  # fmt: skip

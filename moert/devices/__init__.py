"""A second device beside the processor: what holds experts there, and computes with them."""

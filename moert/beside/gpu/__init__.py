"""A second device beside the processor (Fiddler, Kamahori et al. 2024)."""

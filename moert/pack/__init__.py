"""The pack format: the meaning of a pack's bytes (see SPEC.md)."""

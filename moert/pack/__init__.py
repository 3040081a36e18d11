"""The pack format: what the bytes mean (see SPEC.md)."""

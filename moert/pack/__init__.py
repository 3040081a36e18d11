"""The pack format: what the bytes mean (see SPEC.md). No torch in here."""

"""The two shapes of model a pack can hold, in torch: decoder-only and encoder–decoder."""

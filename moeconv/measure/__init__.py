"""Losses of widths on text: models on trial, scores of their answers, and the journal that keeps every measurement."""

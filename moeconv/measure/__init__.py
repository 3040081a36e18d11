"""What widths cost on text: models in memory, scores of their answers, and the journal that keeps every measurement."""

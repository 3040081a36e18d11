"""From logits to text: choosing tokens, turning them into text, knowing when to stop."""

"""Conversations: messages become a prompt by the model's own template, and answers come back without its marks."""

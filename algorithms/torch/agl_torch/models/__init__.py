"""A policy's model and tokenizer, loaded."""

"""Text to tokens: corpora, tokenizers, prepared folders, and batches of what they hold."""

"""GPT-2 itself: sizes, modules, weights in files, and text drawn from it."""

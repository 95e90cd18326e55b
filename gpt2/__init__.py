"""GPT-2: the model, its data, and a training loop that takes a recipe."""

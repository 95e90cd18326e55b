"""GPT-2 and Llama: the models, their data, and a training loop that takes a recipe.

Four packages, each of which imports those before it, and never one after it:

- `data`: text, tokenizers, prepared tokens, and the batches that are read of them.
- `model`: families of models, their sizes, their weights in files, text that they write.
- `training`: settings, `loop` and the step in it, checkpoints, logs, runs' folders, studies.
- `bench`: a step measured against torch's own, and the kernels of one tuned.

What the user can mend is a `UsageError`, whose text says what was given and what is accepted; of a
file, an `Unreadable`. Docstrings name errors beyond that, and those that a caller is to tell apart.
"""

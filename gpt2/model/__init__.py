"""GPT-2 and Llama themselves: sizes, modules, weights in files, and text drawn from them."""

"""Slow and right: every op in PyTorch, one module an op, importing nothing else of ours."""

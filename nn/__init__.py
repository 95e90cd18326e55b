"""Modules over the ops: what a model uses instead of torch.nn to train in INT8."""

from jetfire.nn.linear import Int8Linear, convert

__all__ = ["Int8Linear", "convert"]

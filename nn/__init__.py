"""Modules over the ops: what a model uses instead of torch.nn to train in INT8."""

from jetfire.nn.linear import Int8Linear, convert
from jetfire.ops import profiles

__all__ = ["Int8Linear", "convert"]

profiles.preload()

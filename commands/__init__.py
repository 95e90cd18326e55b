"""The commands of `jetfire`, a file each: their options, checked, and the function behind them."""

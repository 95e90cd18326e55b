"""Models that are not ours: training steps of any model, and advice on what to convert."""

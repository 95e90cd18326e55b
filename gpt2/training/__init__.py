"""Training runs: `loop` is what happens in one, `command` begins it."""

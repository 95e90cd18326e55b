"""The floor of measurements: timers, power, peaks, peers, checks and the rows of results."""

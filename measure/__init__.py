"""What is measured, and how: timers, power, peaks, peers, checks and the rows of results."""

"""Search a kernel's configs on the devices at hand, and keep the best as profiles."""

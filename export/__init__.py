"""Ship a tuned kernel: sources or machine code that need neither this package nor its tools."""

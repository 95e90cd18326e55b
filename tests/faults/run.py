"""`jetfire tune` with the faulty kernels beside the others; exits at once, as a script does."""

import sys

if __name__ == "__main__":  # workers import this file too
    import faulty

    from jetfire import cli

    faulty.register()
    sys.exit(cli.execute("tune", sys.argv[1:]))

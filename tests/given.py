"""Settings of a test's runs as `--set` takes them."""

from jetfire.gpt2.training.settings import split


def changed(settings: str, more: str) -> str:
    """Return settings with some of others' values: `--set` takes one value of each."""
    values = {**split([settings]), **split([more] if more else [])}
    return ",".join(f"{name}={value}" for name, value in values.items())

"""`jetfire train prepare`."""

from __future__ import annotations

from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire train prepare openwebtext -o tokens"


def run(
    names: Annotated[
        list[str],
        o.argument(
            "NAME|PATH...",
            "python, shakespeare, shakespeare-char, openwebtext; text files and folders of them.",
            o.CORPORA,
        ),
    ],
    tokenizer: Annotated[
        o.Text,
        o.option(
            "--tokenizer", "NAME", "byte, char or gpt2 (what that text usually gets).", o.TOKENIZERS
        ),
    ] = None,
    vocabulary: Annotated[
        o.File,
        o.option(
            "--vocabulary",
            "FOLDER",
            "With GPT-2's encoder.json and vocab.bpe, instead of a download.",
        ),
    ] = None,
    source: Annotated[
        o.File, o.option("--from", "PATH", "A local copy of what would be downloaded.")
    ] = None,
    output: Annotated[
        o.File, o.option("--output -o", "FOLDER", "For the tokens (the cache, or beside you).")
    ] = None,
    debug: o.Debug = False,
) -> None:
    """Turn text into tokens that training maps into memory; prints their folder."""
    from jetfire.gpt2.data import prepare

    prepare.run(names, tokenizer, vocabulary, source, output)

"""`jetfire train prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(cls=Command)
def prepare(
    names: Annotated[
        list[str],
        o.argument(
            "NAME|PATH...",
            "python, shakespeare, shakespeare-char, openwebtext; text files and folders of them.",
            o.CORPORA,
        ),
    ],
    tokenizer: Annotated[
        str | None,
        o.option(
            "--tokenizer", "NAME", "byte, char or gpt2 (what that text usually gets).", o.TOKENIZERS
        ),
    ] = None,
    vocabulary: Annotated[
        Path | None,
        o.option(
            "--vocabulary",
            "FOLDER",
            "With GPT-2's encoder.json and vocab.bpe, instead of a download.",
        ),
    ] = None,
    source: Annotated[
        Path | None, o.option("--from", "PATH", "A local copy of what would be downloaded.")
    ] = None,
    output: Annotated[
        Path | None, o.option("--output -o", "FOLDER", "For the tokens (the cache, or beside you).")
    ] = None,
    debug: o.Debug = False,
) -> None:
    """Turn text into tokens that training maps into memory; prints their folder."""
    from jetfire.gpt2.prepare import run

    run(names, tokenizer, vocabulary, source, output)

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
        typer.Argument(metavar="NAME|PATH...", help="python, shakespeare, shakespeare-char, "
                       "openwebtext; text files and folders of them.",
                       autocompletion=o.completing(o.CORPORA)),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="byte, char or gpt2 (what that text usually gets).",
                     autocompletion=o.completing(o.TOKENIZERS)),
    ] = None,
    vocabulary: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With GPT-2's encoder.json and vocab.bpe, instead of "
                     "a download."),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH", help="A local copy of what would be downloaded."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="For the tokens (the cache, or "
                     "beside you)."),
    ] = None,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """Turn text into tokens that training maps into memory; prints their folder."""
    from jetfire.gpt2.prepare import run as prepare_text

    prepare_text(names, tokenizer, vocabulary, from_, output)

"""Sources of text: named corpora, and any files and folders of text.

A corpus is a list of files, read as a stream of pieces: a document is one piece or several, cut
where no tokenizer would notice, so that memory is bounded by `PIECE` and not by a file's size. Only
HTML pages and the rows of JSON lines and Parquet are whole documents in memory; of the first two
at most `WHOLE` bytes.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sysconfig
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, NamedTuple

from jetfire.core import files as disk
from jetfire.core.errors import UsageError, not_installed, unknown
from jetfire.core.files import MIB
from jetfire.gpt2.data.prepared import CorpusSource

PIECE = 1 << 20
WHOLE = 64 * MIB
SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# The archives of a data set on the hub, at this revision.
DATA_SET = "Skylion007/openwebtext"
REVISION = "f3808c30e817981b845ec549c43e82bb467d8144"
OPENWEBTEXT = tuple(f"subsets/urlsf_subset{number:02}.tar" for number in range(21))
_HTML = {".html", ".htm", ".xhtml"}
_PROSE = ".txt .text .md .rst .org .tex .pod"
_CODE = ".py .pyi .c .h .cc .cpp .hpp .cu .cuh .rs .go .js .ts .java .sh"
_TEXT = {*_PROSE.split(), *_CODE.split()}
_ROWS = {".jsonl", ".parquet"}
_ARCHIVES = {".tar", ".tgz", ".txz"}
_PACKED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((".gz", ".tgz"), gzip.open),
    **dict.fromkeys((".xz", ".txz"), lzma.open),
    ".bz2": bz2.open,
}


class Piece(NamedTuple):
    """A part of a document, and whether it is the last."""

    text: str
    last: bool


@dataclass(frozen=True)
class Corpus:
    """Files of text.

    Attributes:
        files: (name that does not depend on where the corpus lies, path), in order of the names.
        tail: the split is by position, not by document: the text is one.
    """

    name: str
    files: tuple[tuple[str, Path], ...]
    tail: bool = False

    def pieces(self) -> Iterator[Piece]:
        """Yield the corpus's documents, in pieces.

        Raises:
            UsageError: a file cannot be read or is damaged.
        """
        for _, path in self.files:
            yield from _read(path)

    def source(self) -> CorpusSource:
        """What identifies the corpus: a lone file's SHA-256, or that of all names and SHA-256s."""
        digests = []
        try:
            for name, path in self.files:
                with path.open("rb") as file:
                    digests.append((name, hashlib.file_digest(file, "sha256").hexdigest()))
            size = sum(path.stat().st_size for _, path in self.files)
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from None
        listing = "".join(f"{digest}  {name}\n" for name, digest in digests)
        whole = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()
        return {
            "name": os.fsencode(self.name).decode(errors="replace"),
            "files": len(digests),
            "bytes": size,
            "sha256": digests[0][1] if len(digests) == 1 else whole,
        }


# The named corpora, and what each is prepared with unless another tokenizer is asked for.
TOKENIZERS = {
    "python": "byte",
    "shakespeare": "gpt2",
    "shakespeare-char": "char",
    "openwebtext": "gpt2",
}
NAMED = tuple(TOKENIZERS)
_COPIED = NAMED[1:]


def find(name: str, copy: Path | None, cache: Path, report: Callable[[str], None]) -> Corpus:
    """The corpus of that name, else the text in the file or folder at that path.

    Args:
        copy: a local copy, read instead of downloading.
        cache: folder for downloads; what is of the hub lies in the hub's own cache.
        report: called with a line before each download.
    """
    if name == "python":
        if copy is not None:
            raise UsageError(f"--from {copy}: {name} is read from this Python, nothing to copy")
        return _python()
    if name == "openwebtext":
        return _openwebtext(copy, report)
    if name not in NAMED:
        if copy is not None:
            raise UsageError(f"--from {copy}: expected only with {', '.join(_COPIED)}, not {name}")
        return _local(name, Path(name))
    path = _shakespeare(cache, report) if copy is None else copy
    if not path.is_file():
        raise UsageError(f"--from {path}: expected a text file, the works that {name} is made of")
    return Corpus(name, (("input.txt", path),), tail=True)


def _python() -> Corpus:
    """Python's own standard library without its tests and what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not left_out & set(path.relative_to(root).parts)
    )
    if not names:
        raise UsageError(f"python: no source in {root}: give text files instead")
    return Corpus("python", tuple((name, root / name) for name in names))


def _local(name: str, path: Path) -> Corpus:
    """A file of any text, or a folder's files of known kinds."""
    if path.is_file():
        return Corpus(name, ((path.name, path),))
    if not path.is_dir():
        raise unknown(f"{name}: no such file, folder or corpus", name, NAMED, ", or a path")
    files = sorted((file.relative_to(path).as_posix(), file) for file in _walk(path) if kind(file))
    if not files:
        known = " ".join(sorted(_TEXT | _HTML | _ROWS | _ARCHIVES))
        raise UsageError(
            f"{name}: no text in this folder: expected {known} (or those .gz .xz .bz2)"
        )
    return Corpus(name, tuple(files))


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def kind(path: Path) -> str | None:
    """text, html, .jsonl, .parquet or tar by the file's name; None for what is not text.

    A compressed file whose name does not say what is in it is text, or tar if it holds one.
    """
    suffix = path.suffix.lower()
    if suffix in _PACKED and suffix not in _ARCHIVES:
        suffix = Path(path.stem).suffix.lower()
        if path.suffix.lower() == ".xz" and suffix not in _HTML | _ROWS | _ARCHIVES:
            return "text"
    if suffix in _ARCHIVES:
        return "tar"
    if suffix in _ROWS:
        return suffix
    if suffix in _HTML:
        return "html"
    return "text" if suffix in _TEXT else None


def _read(path: Path) -> Iterator[Piece]:
    """A file's documents, in pieces."""
    try:
        if kind(path) == ".parquet":
            yield from _parquet(path)
            return
        with path.open("rb") as raw:
            yield from _stream(raw, path, str(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot read: {error.strerror or error}") from None
    except (EOFError, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
        raise UsageError(f"{path}: damaged: {error}") from None


def _stream(raw: IO[bytes], path: Path, label: str) -> Iterator[Piece]:
    """Documents of an open file that `path` names, be it packed, an archive or text."""
    suffix = path.suffix.lower()
    opened: Any = _PACKED[suffix](raw) if suffix in _PACKED else raw
    file = io.BufferedReader(opened, 1 << 16)
    what = kind(path)
    if file.peek(512)[257:262] == b"ustar":
        yield from _tar(file, label)
    elif what == "tar":
        raise UsageError(f"{label}: damaged: expected a tar archive")
    elif what == "html":
        yield Piece(
            strip_html(_bounded(file.read(WHOLE + 1), label).decode(errors="replace")), True
        )
    elif what == ".jsonl":
        yield from _jsonl(file, label)
    elif b"\0" in file.peek(512):
        raise UsageError(f"{label}: expected text, it holds NUL bytes")
    else:
        yield from _text(file)


def _bounded(document: bytes, label: str) -> bytes:
    """Return a document that may be held in memory."""
    if len(document) > WHOLE:
        raise UsageError(f"{label}: a document of more than {WHOLE} bytes: expected plain text")
    return document


def _tar(file: IO[bytes], label: str) -> Iterator[Piece]:
    """Members in their order; what is not text is passed over, as in a folder."""
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            path = Path(member.name)
            if not member.isfile() or kind(path) is None or path.suffix == ".parquet":
                continue
            content = archive.extractfile(member)
            if content is not None:
                yield from _stream(content, path, f"{label}: {member.name}")


def _text(file: IO[bytes]) -> Iterator[Piece]:
    """UTF-8 text (what is not becomes U+FFFD), newlines as they are."""
    blocks = iter(lambda: file.read(PIECE), b"")
    return _pieces(codecs.iterdecode(blocks, "utf-8", errors="replace"))


def _whole(text: str) -> Iterator[Piece]:
    """A document that is in memory; JSON can hold halves of surrogate pairs, UTF-8 cannot."""
    return _pieces([text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")])


def _pieces(blocks: Iterable[str]) -> Iterator[Piece]:
    """A document's blocks, cut."""
    held = ""
    for block in blocks:
        held += block
        while len(held) > PIECE:
            place = _cut(held)
            yield Piece(held[:place], False)
            held = held[place:]
    yield Piece(held, True)


def _cut(text: str) -> int:
    """Return where to cut a text longer than PIECE.

    That is after a newline between two characters that are no white space, where GPT-2's pattern
    cuts too; without one after any newline, else anywhere.
    """
    for place in (m.start() for m in re.finditer(r"\n", text[PIECE // 2 : PIECE])):
        at = place + PIECE // 2
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
    return text.rfind("\n", 1, PIECE) + 1 or PIECE


def _jsonl(file: IO[bytes], label: str) -> Iterator[Piece]:
    """A document a line: a string, or an object with `text`."""
    lines = iter(lambda: file.readline(WHOLE + 1), b"")
    for number, line in enumerate(lines, 1):
        if not _bounded(line, f"{label}:{number}").strip():
            continue
        try:
            row = json.loads(line)
            text = row["text"] if isinstance(row, dict) else row
        except (ValueError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise UsageError(
                f"{label}:{number}: expected a JSON string or an object with a string `text`"
            )
        yield from _whole(text)


def _parquet(path: Path) -> Iterator[Piece]:
    """A document a row, from the column `text`."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise not_installed("pyarrow", "text") from None
    try:
        table = parquet.ParquetFile(path)
        if "text" not in table.schema_arrow.names:
            raise UsageError(f"{path}: expected a column `text`")
        for rows in table.iter_batches(1024, columns=["text"]):
            for text in rows.column(0).to_pylist():
                if text is not None:
                    yield from _whole(text)
    except ArrowException as error:
        raise UsageError(f"{path}: damaged: {error}") from None


_INLINE = (
    "a abbr acronym b bdi bdo big cite code data dfn em font i img input kbd label mark q s samp "
    "small span strong sub sup time tt u var wbr"
)


class _Page(HTMLParser):
    """Return the text of a page: a line per block, no title, scripts or styles; <pre> as it is."""

    SKIPPED = ("title", "script", "style", "template", "svg", "noscript")
    INLINE = frozenset(_INLINE.split())

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipped: str | None = None
        self.depth = self.pre = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if self.skipped is not None:
            self.depth += tag == self.skipped
        elif tag in self.SKIPPED:
            self.skipped, self.depth = tag, 1
        else:
            self.pre += tag == "pre"
            self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.skipped is not None:
            self.depth -= tag == self.skipped
            if self.depth == 0:
                self.skipped = None
        else:
            self.pre = max(0, self.pre - (tag == "pre"))
            self._break(tag)

    def _break(self, tag: str) -> None:
        if tag in ("td", "th"):
            if not self._begins():
                self.parts.append("\t")
        elif tag not in self.INLINE:
            self.parts.append("\n")

    def _begins(self) -> bool:
        """Whether a line, a cell or a word begins here."""
        return not self.parts or self.parts[-1][-1] in "\n\t "

    def handle_data(self, data: str) -> None:
        if self.skipped is not None:
            return
        if not self.pre:
            data = re.sub(r"\s+", " ", data)
            data = data.lstrip() if self._begins() else data
        if data:
            self.parts.append(data)


def strip_html(page: str) -> str:
    """A page's text: blocks are paragraphs, runs of blank lines are one."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    text = "\n".join(line.rstrip() for line in "".join(parser.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _openwebtext(copy: Path | None, report: Callable[[str], None]) -> Corpus:
    """The data set's own archives, from a folder or the hub."""
    if copy is not None:
        if not copy.exists():
            raise UsageError(
                f"--from {copy}: no such file or folder: expected openwebtext's .tar, .xz, "
                ".parquet, .jsonl or .txt files"
            )
        return Corpus("openwebtext", _local(str(copy), copy).files)
    return Corpus("openwebtext", tuple((name, _from_hub(name, report)) for name in OPENWEBTEXT))


def _from_hub(name: str, report: Callable[[str], None]) -> Path:
    """A file of openwebtext in the hub's own cache, whole and right or not at all."""
    try:
        import huggingface_hub as hub
    except ImportError:
        raise not_installed("huggingface_hub", "text") from None
    file: Any = {
        "repo_id": DATA_SET,
        "filename": name,
        "repo_type": "dataset",
        "revision": REVISION,
    }
    held = hub.try_to_load_from_cache(**file)
    if isinstance(held, str):
        return Path(held)
    report(f"downloading {DATA_SET}/{name}")
    try:
        expected = hub.get_hf_file_metadata(hub.hf_hub_url(**file)).etag  # its SHA-256
        place = Path(hub.hf_hub_download(**file))
    except Exception as error:  # whatever its HTTP library raises
        raise _not_downloaded(f"{DATA_SET}/{name}", error) from None
    found = disk.digest(place)
    if found != expected:
        place.resolve().unlink()
        raise UsageError(f"{DATA_SET}/{name} has SHA-256 {found}, expected {expected}: not used")
    return place


def _shakespeare(cache: Path, report: Callable[[str], None]) -> Path:
    """The file that its address holds, kept in `cache`, right or not at all."""
    place = cache / "tinyshakespeare.txt"
    if place.is_file():
        return place
    report(f"downloading {SHAKESPEARE}")
    try:
        with urllib.request.urlopen(SHAKESPEARE, timeout=60) as answer:
            content: bytes = answer.read()
    except (OSError, HTTPException) as error:
        raise _not_downloaded(SHAKESPEARE, error) from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise UsageError(
            f"{SHAKESPEARE} has SHA-256 {found}, expected {SHAKESPEARE_SHA256}: not used"
        )
    disk.write(place, content, folders=True)
    return place


def _not_downloaded(what: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())[:120]
    return UsageError(
        f"cannot download {what} ({reason}): expected a network, "
        "or a local copy: jetfire-train prepare NAME --from PATH"
    )


def stem(names: Sequence[str]) -> str:
    """A file name for what is prepared from these."""
    first = names[0]
    if first in NAMED:
        return first
    return os.path.basename(os.path.realpath(first)).split(".")[0][:100]

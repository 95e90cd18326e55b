"""Fine-tune converted models to tell from which package a page of documentation is.

    python examples/finetune.py --recipe bf16,int8,int4-hq-lss --seed 0,1,2

The text is what is installed: docstrings of the largest packages, with the packages' names masked,
split into training and test pages by file. BERT and GPT-2 are made from configs, trained on the
training pages for a while in BF16 (masked tokens, next tokens), and from there fine-tuned in every
recipe with every seed. The table has the accuracy on the test pages. Needs `jetfire[hf]`. Without a
GPU, what is BF16 otherwise is fp32, and OMP_NUM_THREADS=1 is faster where models are small.
"""

import argparse
import ast
import importlib.util
import json
import random
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from jetfire.nn import convert

Row = dict[str, Any]
Rows = list[Row]
MASK = "<name>"
SPECIAL = {f"{name}_token": f"<{name}>" for name in ("pad", "cls", "sep", "mask", "unk")}
SHORTEST = 120  # characters of a page
SIZES = {"packages": 12, "pages": 800, "vocabulary": 8192, "length": 128, "layers": 6, "heads": 8}
SIZES |= {"width": 512, "batch": 32, "pretrain": 1500, "steps": 800}


class Page(NamedTuple):
    """A text, the number of its package, and whether it is of a test file."""

    text: str
    label: int
    test: bool


def docstrings(file: Path) -> Iterator[str]:
    """Yield a module's docstrings that are long enough for a page."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # a template, or a test of an encoding
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= SHORTEST:
                yield text


def pages_of(folder: Path, count: int) -> list[tuple[str, bool]]:
    """Return up to so many texts of a package, and whether the file is one in five to test by."""
    files = {file: zlib.crc32(str(file.relative_to(folder)).encode()) for file in python(folder)}
    found: dict[str, bool] = {}
    for file in sorted(files, key=lambda file: files[file]):
        for text in docstrings(file):
            found.setdefault(text, files[file] % 5 == 0)
        if len(found) >= count:
            break
    return list(found.items())[:count]


def python(folder: Path) -> list[Path]:
    """Return a package's modules, but for other packages that it brings along."""
    return [file for file in folder.rglob("*.py") if "vendor" not in str(file)]


def corpus(packages: int, count: int) -> tuple[list[str], list[Page]]:
    """Return the names of the largest packages, and as many pages of each.

    Texts that two packages share are left out, and the names of all are masked in all texts.
    """
    size: dict[str, tuple[int, Path]] = {}
    for name in packages_distributions():
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if len(places) == 1 and not name.startswith(("_", "jetfire")):
            folder = Path(places[0])
            size[name] = -sum(file.stat().st_size for file in python(folder)), folder
    texts: dict[str, list[tuple[str, bool]]] = {}
    for name in sorted(size, key=lambda name: (size[name][0], name)):
        if len(texts) < packages and len(found := pages_of(size[name][1], count)) == count:
            texts[name] = found
    if len(texts) < packages:
        raise SystemExit(f"{len(texts)} packages have {count} pages: expected {packages} to")
    times = Counter(text for found in texts.values() for text, _ in found)
    names = re.compile("|".join(map(re.escape, texts)), re.IGNORECASE)
    return list(texts), [
        Page(names.sub(MASK, text), label, test)
        for label, found in enumerate(texts.values())
        for text, test in found
        if times[text] == 1
    ]


def tokenizer_of(pages: list[Page], vocabulary: int) -> Any:
    """Return a byte-level BPE of the training pages."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options: Row = {"special_tokens": [*SPECIAL.values(), MASK], "show_progress": False}
    options |= {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, **options)
    bpe.train_from_iterator((page.text for page in pages if not page.test), trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **SPECIAL)


def encoded(pages: list[Page], tokenizer: Any, length: int) -> Rows:
    cut: Row = {"truncation": True, "max_length": length, "padding": "max_length"}
    ids = tokenizer([page.text for page in pages], **cut)
    both = zip(ids["input_ids"], ids["attention_mask"], pages, strict=True)
    return [{"input_ids": i, "attention_mask": m, "labels": page.label} for i, m, page in both]


def arguments(size: argparse.Namespace, folder: Path, steps: int, seed: int) -> TrainingArguments:
    gpu, batch = torch.cuda.is_available(), size.batch
    options: Row = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    options |= {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    options |= {"learning_rate": size.rate, "warmup_steps": steps // 10}
    options |= {"bf16": gpu, "use_cpu": not gpu}
    return TrainingArguments(str(folder), max_steps=steps, seed=seed, **options)


def pretrained(kind: str, size: argparse.Namespace, tokenizer: Any, rows: Rows) -> Path:
    """Train on the pages' tokens in BF16; return where the weights are."""
    transformers.set_seed(0)
    shape = {"hidden_size": size.width, "intermediate_size": 4 * size.width}
    shape |= {"num_hidden_layers": size.layers, "num_attention_heads": size.heads}
    shape |= {"max_position_embeddings": size.length, "num_labels": size.packages}
    shape |= {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos"))}
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **shape)
    bert = kind == "bert"
    model = transformers.AutoModelForMaskedLM if bert else transformers.AutoModelForCausalLM
    tokens = [{"input_ids": row["input_ids"]} for row in rows]
    folder = size.output / kind
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=bert)
    options = arguments(size, folder, size.pretrain, 0)
    run = Trainer(model.from_config(config), options, collator, tokens)
    run.train()
    run.save_model(str(folder))
    return folder


def right(predicted: Any) -> dict[str, float]:
    return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean()}


def accuracy(
    weights: Path, recipe: str, seed: int, size: argparse.Namespace, train: Rows, test: Rows
) -> float:
    """Fine-tune a classifier, whose head stays in BF16; return its accuracy on the test pages."""
    transformers.set_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(weights)
    convert(model, recipe, skip=("classifier" if hasattr(model, "classifier") else "score",))
    options = arguments(size, weights / f"{recipe}-{seed}", size.steps, seed)
    run = Trainer(model, options, None, train, test, compute_metrics=right)
    run.train()
    return float(run.evaluate()["eval_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    lists = {"model": "bert,gpt2", "recipe": "bf16,int8,int4-hq-lss", "seed": "0,1,2"}
    for name, value in (lists | SIZES | {"rate": 3e-4}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/finetune"))
    size = parser.parse_args()
    names, pages = corpus(size.packages, size.pages)
    random.Random(0).shuffle(pages)
    tokenizer = tokenizer_of(pages, size.vocabulary)
    sets = ([page for page in pages if page.test == which] for which in (False, True))
    train, test = (encoded(of_set, tokenizer, size.length) for of_set in sets)
    print(f"{len(train)} training and {len(test)} test pages of {len(names)} packages:", *names)
    found: dict[str, list[float]] = {}
    for kind in size.model.split(","):
        weights = pretrained(kind, size, tokenizer, train)
        for recipe in size.recipe.split(","):
            seeds = map(int, size.seed.split(","))
            scores = [accuracy(weights, recipe, seed, size, train, test) for seed in seeds]
            found[f"{kind} {recipe}"] = scores
    (size.output / "accuracy.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"| model, recipe | accuracy (chance {1 / len(names):.3f}) | seeds |\n|---|---|---|")
    for name, scores in found.items():
        each = " ".join(f"{score:.3f}" for score in scores)
        print(f"| {name} | {statistics.mean(scores):.3f} | {each} |")


if __name__ == "__main__":
    main()

"""Converted toy models under transformers' Trainer and Accelerate, in processes of their own.

As a script it is one of those that Accelerate starts. Argument: where the losses go, as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from jetfire.nn import convert
from jetfire.tests.processes.leaving import leave

VOCABULARY, LENGTH, WIDTH = 96, 16, 32
STEPS, SAVED, KILLED = 60, 25, 40
END = {"bos_token_id": 0, "eos_token_id": 0}


def model_of(kind: str, recipe: str, layers: int = 1, **options: Any) -> Any:
    """Return a converted model of one seed, without dropout unless `options` has a rate."""
    torch.manual_seed(0)
    rate = options.pop("dropout", 0.0)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=LENGTH,
                n_embd=WIDTH,
                n_layer=layers,
                n_head=2,
                resid_pdrop=rate,
                embd_pdrop=rate,
                attn_pdrop=rate,
                loss_type="ForCausalLM",
                **END,
            )
        )
    elif kind == "bert":
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=VOCABULARY,
                max_position_embeddings=LENGTH,
                hidden_size=WIDTH,
                num_labels=3,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=layers,
                num_attention_heads=2,
                hidden_dropout_prob=rate,
                attention_probs_dropout_prob=rate,
            )
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                max_position_embeddings=LENGTH,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=layers,
                num_attention_heads=2,
                num_key_value_heads=1,
                **END,
            )
        )
    convert(model, recipe, **options)
    return model


def rows(kind: str, count: int = 64) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count in steps of one to three; BERT is to tell the step."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        first = torch.randint(VOCABULARY, (1,), generator=generator)
        ids = (first + torch.arange(LENGTH) * (1 + i % 3)) % VOCABULARY
        found.append({"input_ids": ids, "labels": torch.tensor(i % 3) if kind == "bert" else ids})
    return found


def trainer(folder: Path, kind: str, recipe: str, steps: int = 6, **options: Any) -> Trainer:
    """Return a Trainer of a toy model; what `model_of` takes is taken from the options."""
    own = {name: options.pop(name) for name in ("layers", "dropout", "frozen") if name in options}
    arguments = {
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "seed": 1,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    return Trainer(
        model_of(kind, recipe, **own),
        TrainingArguments(str(folder), **arguments),
        train_dataset=rows(kind),
        eval_dataset=rows(kind, 8),
    )


def losses(run: Trainer) -> list[float]:
    return [record["loss"] for record in run.state.log_history if "loss" in record]


class Killer(TrainerCallback):
    """Ends the process in the middle of a run, as `kill -9` does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if state.global_step == KILLED:
            os._exit(9)


def long_run(folder: Path) -> Trainer:
    """Return the run that is killed: of STEPS with dropout, a checkpoint every SAVED."""
    saved = {"save_strategy": "steps", "save_steps": SAVED}
    options = {"dropout": 0.1, "per_device_train_batch_size": 4, **saved}
    return trainer(folder, "gpt2", "int8", STEPS, **options)


def with_accelerate(recipe: str, sharded: bool, adapters: bool) -> list[float]:
    """Return the losses of a Llama that an Accelerator prepared, of all processes' rows."""
    AcceleratorState._reset_state()
    plugin = None
    if sharded:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if sharded:  # which it takes for GPUs alone
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    model = model_of("llama", recipe, frozen=adapters)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    name = "FSDP" if sharded else "DistributedDataParallel"
    assert accelerator.num_processes == 1 or type(model).__name__.startswith(name)
    ids = torch.stack([row["input_ids"] for row in rows("llama", 8)])
    mine = ids[accelerator.process_index :: accelerator.num_processes]
    found = []
    for _ in range(4):
        loss = model(input_ids=mine, labels=mine).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(accelerator.gather(loss.detach()).mean()))
    return found


# What two processes are to do as one does: recipes; recipe, whether sharded, and with adapters.
TRAINER = ("bf16", "int8", "int4-hq-lss")
ACCELERATOR = {
    "ddp adapters": ("int8", False, True),
    "fsdp bf16": ("bf16", True, False),
    "fsdp int8": ("int8", True, False),
    "fsdp int4": ("int4-hq-lss", True, False),
    "fsdp adapters": ("int8", True, True),
}


def of_trainer(folder: Path, recipe: str, processes: int) -> list[float]:
    """Return the losses of a Trainer's run that accumulates gradients of 2×8 rows a step."""
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8 // processes}
    run = trainer(folder, "gpt2", recipe, **options)
    run.train()
    return losses(run)


def parallel(file: Path) -> None:
    """Write the losses of all that two processes are to do as one, by DDP and FSDP2."""
    torch.set_num_threads(1)
    found = {
        "trainer": {name: of_trainer(file.parent / name, name, 2) for name in TRAINER},
        "accelerator": {name: with_accelerate(*how) for name, how in ACCELERATOR.items()},
    }
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(found))


def killed(folder: Path) -> None:
    """Train, and die in the middle."""
    torch.set_num_threads(1)
    run = long_run(folder)
    run.add_callback(Killer())
    run.train()


if __name__ == "__main__":
    parallel(Path(sys.argv[1]))
    leave()

"""transformers' Trainer on a tiny GPT-2: evaluation, checkpoints, a resumed run."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from recording import Recording, from_command_line

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
WORDS, LENGTH, STEPS = 256, 32, 24


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Return random rows of tokens, in which every other one follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(WORDS, (count, LENGTH), generator=generator)
    rows[:, 1::2] = (rows[:, ::2] * 7 + 1) % WORDS
    return [{"input_ids": row, "labels": row} for row in rows]


class Clock(transformers.TrainerCallback):
    """Notes when each step ends."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.recording.step_ends()


def trainer(recording: Recording, steps: int, by_name: bool) -> transformers.Trainer:
    """Return a trainer whose last batches are not full."""
    settings = transformers.TrainingArguments(
        output_dir=str(recording.folder / "run"), use_cpu=True, report_to=[], seed=3,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=steps,
        eval_strategy="steps", eval_steps=8, save_steps=8, logging_steps=4, disable_tqdm=True,
        learning_rate=0.005,
        ddp_backend=recording.backend if by_name else None,
    )  # fmt: skip
    transformers.set_seed(7)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    return transformers.Trainer(
        model, settings, train_dataset=texts(90, 1), eval_dataset=texts(13, 2),
        callbacks=[Clock(recording)],
    )  # fmt: skip


def timeless(log: dict[str, Any]) -> dict[str, Any]:
    """Return what a log says of numbers other than times."""
    words = ("runtime", "per_second", "flos")
    return {key: value for key, value in log.items() if not any(word in key for word in words)}


def main() -> None:
    recording = from_command_line()
    by_name = "--by-name" in sys.argv
    if not by_name:
        torch.distributed.init_process_group(recording.backend)
    run = trainer(recording, STEPS, by_name)
    run.train()
    recording.keep("logs", [timeless(log) for log in run.state.log_history])
    recording.keep("model", run.model.state_dict())
    recording.keep("predicted", torch.from_numpy(run.predict(texts(7, 3)).predictions))
    torch.distributed.barrier()
    for step in (8, 16, 24):
        saved = Path(run.args.output_dir) / f"checkpoint-{step}"
        recording.keep(saved.name, safetensors.torch.load_file(saved / "model.safetensors"))
    ends = list(recording.ends)
    run = trainer(recording, STEPS + 4, by_name)
    run.train(resume_from_checkpoint=str(saved))
    recording.ends = ends
    recording.keep("resumed", run.model.state_dict())
    recording.save()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

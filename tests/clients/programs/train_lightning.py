"""Lightning's Trainer with DDPStrategy, its checkpoints and early stopping; then Fabric."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from recording import CLASSES, ROWS, STEPS, Recording, examples, from_command_line, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    """Network, metric and what is logged across ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, _: int) -> Any:
        rows, labels = batch
        loss = cross_entropy(self.net(rows), labels)
        self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        rows, labels = batch
        found = self.net(rows)
        self.accuracy(found, labels)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("loss", cross_entropy(found, labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.002)


class Clock(Callback):
    """Notes when each step ends, and what is logged at the end of an epoch."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def on_train_batch_end(self, *_: Any) -> None:
        self.recording.step_ends()

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.recording.keep(f"epoch {trainer.current_epoch}", trainer.callback_metrics)


def trainer(recording: Recording) -> None:
    """Train for three epochs, whose last batch is not full."""
    checkpoints = ModelCheckpoint(recording.folder / "checkpoints", monitor="loss", save_top_k=1)
    run = lightning.Trainer(
        accelerator="cpu", devices=2, max_epochs=3, logger=False, enable_progress_bar=False,
        strategy=DDPStrategy(process_group_backend=recording.backend),
        callbacks=[checkpoints, EarlyStopping("loss", patience=1), Clock(recording)],
        enable_model_summary=False, gradient_clip_val=0.5, default_root_dir=recording.folder,
    )  # fmt: skip
    model = Classifier()
    run.fit(
        model,
        DataLoader(examples(2 * ROWS * STEPS // 2 - 3), batch_size=ROWS, shuffle=True),
        DataLoader(examples(101, seed=2), batch_size=ROWS),
    )
    recording.keep("model", model.state_dict())
    saved = torch.load(checkpoints.best_model_path, weights_only=False)
    recording.keep("checkpoint", saved["state_dict"])


def fabric(recording: Recording) -> None:
    """Train by hand in Fabric, whose collectives are used one by one."""
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=2,
        strategy=lightning.fabric.strategies.DDPStrategy(process_group_backend=recording.backend),
    )
    fabric.launch()
    net = network()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(examples(5 * ROWS), batch_size=ROWS))
    losses = []
    for rows, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(net(rows), labels)
        fabric.backward(loss)
        fabric.clip_gradients(net, optimizer, max_norm=0.5)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean"))
    recording.keep("fabric", net.state_dict())
    recording.keep("losses", losses)
    recording.keep("gathered", fabric.all_gather({"rank": torch.tensor(fabric.global_rank)}))
    recording.keep("object", fabric.broadcast({"from": [fabric.global_rank]}))
    fabric.barrier()


if __name__ == "__main__":
    recording = from_command_line()
    trainer(recording)
    fabric(recording)
    recording.save()
    torch.distributed.destroy_process_group()

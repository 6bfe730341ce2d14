"""torchmetrics' states across ranks: sums, minima, lists of uneven length, empty lists."""

from __future__ import annotations

import warnings

import torch
import torchmetrics
from recording import CLASSES, FEATURES, ROWS, STEPS, examples, from_command_line, network

warnings.simplefilter("ignore")


def metrics() -> torchmetrics.MetricCollection:
    """Return metrics of classes, whose states are sums and lists."""
    one = {"task": "multiclass", "num_classes": CLASSES}
    return torchmetrics.MetricCollection({
        "accuracy": torchmetrics.Accuracy(**one),
        "auroc": torchmetrics.AUROC(**one),
        "binned": torchmetrics.AveragePrecision(thresholds=20, **one),
        "confusion": torchmetrics.ConfusionMatrix(**one),
        "f1": torchmetrics.F1Score(average="macro", **one),
    })  # fmt: skip


def main() -> None:
    recording = from_command_line()
    torch.distributed.init_process_group(recording.backend)
    rank = torch.distributed.get_rank()
    net = network().eval()
    collection, mean, spread = metrics(), torchmetrics.MeanMetric(), torchmetrics.CatMetric()
    smallest, error = torchmetrics.MinMetric(), torchmetrics.MeanSquaredError()
    likeness = torchmetrics.SpearmanCorrCoef()
    rows = examples(ROWS * STEPS, seed=1 + rank)
    for step in range(STEPS):
        inputs, labels = rows[step * ROWS : (step + 1) * ROWS - step % (3 + rank)]
        with torch.no_grad():
            found = net(inputs).softmax(1)
        collection.update(found, labels)
        mean.update(found.max(1).values)
        smallest.update(found.min())
        error.update(found[:, 0].contiguous(), inputs[:, 0].contiguous())
        likeness.update(found[:, 1].contiguous(), inputs[:, 1].contiguous())
        if rank == 1:
            spread.update(inputs[0])  # rank 0's list stays empty
        recording.keep(f"step {step}", torchmetrics.functional.accuracy(
            found, labels, task="multiclass", num_classes=CLASSES,
        ))  # fmt: skip
        if step % 4 == 3:
            recording.keep(f"after {step}", collection.compute())
        recording.step_ends()
    recording.keep("mean", mean.compute())
    recording.keep("smallest", smallest.compute())
    recording.keep("error", error.compute())
    recording.keep("likeness", likeness.compute())
    spread.update(torch.full((FEATURES + rank,), float(rank)))
    recording.keep("spread", spread.compute())
    recording.save()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

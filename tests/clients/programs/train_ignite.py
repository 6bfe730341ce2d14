"""ignite's engines, with metrics over ranks and a checkpoint.

`--auto` leaves it to ignite to wrap the model, `--by-name` to make the group.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, ConfusionMatrix, Loss
from recording import CLASSES, ROWS, STEPS, examples, from_command_line, network
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")


def main() -> None:
    recording = from_command_line()
    if "--by-name" in sys.argv:
        idist.initialize(recording.backend)
    else:
        torch.distributed.init_process_group(recording.backend)
    wrap = idist.auto_model if "--auto" in sys.argv else DistributedDataParallel
    net = wrap(network())
    optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=0.1))
    loader = idist.auto_dataloader(examples(2 * ROWS * STEPS), batch_size=2 * ROWS, shuffle=True)
    test = idist.auto_dataloader(examples(96, seed=2), batch_size=2 * ROWS)

    def step(_: Engine, batch: Any) -> float:
        net.train()
        optimizer.zero_grad()
        rows, labels = batch
        loss = cross_entropy(net(rows), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    metrics = {
        "accuracy": Accuracy(),
        "loss": Loss(cross_entropy),
        "confusion": ConfusionMatrix(CLASSES),
    }
    evaluator = create_supervised_evaluator(net, metrics=metrics)
    saver = DiskSaver(recording.folder / "checkpoints", create_dir=True, require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": net}, saver))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, recording.step_ends)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        evaluator.run(test)
        recording.keep(f"epoch {engine.state.epoch}", evaluator.state.metrics)
        recording.keep(f"loss {engine.state.epoch}", idist.all_gather(engine.state.output))

    trainer.run(loader, max_epochs=2)
    inner = net.module if isinstance(net, DistributedDataParallel) else net
    recording.keep("model", dict(inner.named_parameters()))
    recording.keep("sum", idist.all_reduce(torch.tensor([1.0 + idist.get_rank()])))
    recording.keep("word", idist.broadcast("from rank 1", src=1))
    recording.keep("all", idist.all_gather(torch.arange(3) + idist.get_rank()))
    idist.barrier()
    recording.save()
    idist.finalize()


if __name__ == "__main__":
    main()

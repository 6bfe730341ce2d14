"""accelerate's Accelerator: loaders, accumulated gradients, gathered metrics, saved states."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    InitProcessGroupKwargs,
    broadcast,
    broadcast_object_list,
    gather_object,
    reduce,
)
from recording import ROWS, STEPS, Recording, examples, from_command_line, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")


def accelerator(backend: str, by_name: bool) -> Accelerator:
    """Return an accelerator, given the backend's name or the group that there is."""
    handlers = []
    if by_name:
        handlers.append(InitProcessGroupKwargs(backend=backend))
    else:
        torch.distributed.init_process_group(backend)
    made = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=handlers)
    assert made.state.backend == (backend if by_name else "gloo")  # whatever the group is
    return made


def train(recording: Recording, run: Accelerator) -> None:
    """Train, evaluate with an uneven last batch, save and load."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(examples(2 * ROWS * STEPS), batch_size=ROWS, shuffle=True)
    test = DataLoader(examples(101, seed=2), batch_size=ROWS)
    net, optimizer, loader, test = run.prepare(net, optimizer, loader, test)
    assert isinstance(net, torch.nn.parallel.DistributedDataParallel)
    for rows, labels in loader:
        with run.accumulate(net):
            loss = cross_entropy(net(rows), labels)
            run.backward(loss)
            if run.sync_gradients:
                run.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if run.sync_gradients:
            recording.step_ends()
    recording.keep("loss", run.gather(loss.detach()))
    net.eval()
    found: list[Any] = []
    with torch.no_grad():
        for rows, labels in test:
            found.append(run.gather_for_metrics((net(rows), labels)))
    recording.keep("test", found)
    recording.keep("model", run.unwrap_model(net).state_dict())
    run.save_state(str(recording.folder / "state"))
    run.wait_for_everyone()
    run.unwrap_model(net)[0].weight.data.zero_()
    run.load_state(str(recording.folder / "state"))
    recording.keep("loaded", run.unwrap_model(net).state_dict())
    recording.keep("optimizer", optimizer.state_dict()["state"])


def collectives(recording: Recording, run: Accelerator) -> None:
    """Use accelerate's collectives one by one."""
    rank = run.process_index
    mine = torch.randn(3 + rank, 4)
    padded = run.pad_across_processes(mine, dim=0)
    recording.keep("padded", run.gather(padded))
    recording.keep("sum", reduce({"a": padded}, "sum"))
    recording.keep("mean", reduce(padded, "mean"))
    recording.keep("broadcast", broadcast(padded, from_process=1))
    recording.keep("objects", gather_object([{"rank": rank}]))
    recording.keep("object", broadcast_object_list([rank + 5]))
    with run.split_between_processes([10, 11, 12], apply_padding=True) as part:
        recording.keep("part", part)
    run.wait_for_everyone()


if __name__ == "__main__":
    recording = from_command_line()
    run = accelerator(recording.backend, by_name="--by-name" in sys.argv)
    train(recording, run)
    collectives(recording, run)
    recording.save()
    run.end_training()

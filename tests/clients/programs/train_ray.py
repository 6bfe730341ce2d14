"""Ray Train's TorchTrainer: two workers that it starts itself, with a checkpoint of each epoch."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import torch as ray_torch
from recording import CLASSES, ROWS, STEPS, Recording, examples, network
from torch.nn.functional import cross_entropy

warnings.simplefilter("ignore")


def loop(config: dict[str, Any]) -> None:
    """Train on one worker."""
    context = train.get_context()
    recording = Recording(config["folder"], config["backend"], context.get_world_rank())
    net = ray_torch.prepare_model(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(
        examples(2 * ROWS * STEPS), ROWS, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    loader = ray_torch.prepare_data_loader(loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for rows, labels in loader:
            loss = cross_entropy(net(rows), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recording.step_ends()
        recording.keep(f"loss {epoch}", loss)
        with tempfile.TemporaryDirectory() as folder:
            if context.get_world_rank() == 0:
                torch.save(net.module.state_dict(), Path(folder) / "net.pt")
            saved = train.Checkpoint.from_directory(folder)
            train.report({"loss": loss.item()}, checkpoint=saved)
    recording.keep("model", net.module.state_dict())
    everywhere = [torch.empty(CLASSES) for _ in range(context.get_world_size())]
    torch.distributed.all_gather(everywhere, net.module[3].bias.detach())
    recording.keep("all biases", everywhere)
    recording.save()


def main() -> None:
    folder, backend = sys.argv[1:3]
    # Workers find the modules that this process does.
    paths = {"env_vars": {"PYTHONPATH": ":".join(sys.path)}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=paths)
    result = ray_torch.TorchTrainer(
        loop,
        train_loop_config={"folder": folder, "backend": backend},
        scaling_config=train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        torch_config=ray_torch.TorchConfig(backend=backend, timeout_s=150),
        run_config=train.RunConfig(name="job", storage_path=str(Path(folder) / "results")),
    ).fit()
    assert result.checkpoint is not None
    ray.shutdown()


if __name__ == "__main__":
    main()

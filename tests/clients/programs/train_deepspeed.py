"""DeepSpeed's engine in ZeRO stages 0 to 3 on the CPU."""

from __future__ import annotations

import logging
import os
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

import deepspeed
import torch
from recording import ROWS, STEPS, examples, from_command_line, network
from torch.nn.functional import cross_entropy

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)


def main() -> None:
    recording = from_command_line()
    deepspeed.init_distributed(dist_backend=recording.backend, verbose=False)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = examples(2 * ROWS * STEPS)
    for stage in range(4):
        net = network()
        del net[2]  # ZeRO does not synchronize the buffers of a BatchNorm1d
        engine, *_ = deepspeed.initialize(
            model=net,
            model_parameters=net.parameters(),
            optimizer=torch.optim.Adam(net.parameters(), lr=0.002),
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        losses = []
        for step in range(STEPS // 2):
            first = (step * size + rank) * ROWS
            rows, labels = data[first : first + ROWS]
            loss = cross_entropy(engine(rows), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
            recording.step_ends()
        recording.keep(f"stage {stage} losses", losses)
        with deepspeed.zero.GatheredParameters(
            list(engine.module.parameters()), enabled=stage == 3
        ):
            recording.keep(f"stage {stage}", dict(engine.module.named_parameters()))
    recording.save()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

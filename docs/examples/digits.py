"""Train a classifier of handwritten digits on several ranks: one collective call per step.

    cydistrun --nproc-per-node 2 docs/examples/digits.py
    torchrun --nproc-per-node 2 docs/examples/digits.py
    mpirun -n 2 python docs/examples/digits.py
    python docs/examples/digits.py --ranks 2            starts itself with one of these

Data parallel: every rank holds the whole model, takes its share of each batch, and the
gradients are averaged by one `all_reduce_coalesced`. The same training then runs on one rank
alone, to compare. The data are the 1,797 digits that come with scikit-learn.

Exits with 1 if the test accuracy is below 95 %, if the replicas differ in a single bit, or if
one rank alone does not find the same losses.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# Before numpy is imported: ranks share the cores, so each takes one.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402

import cydist as dist  # noqa: E402

SEED = 20
LAYERS = (64, 512, 512, 10)
BATCH = 120  # samples in a step, over all ranks together
RATE, MOMENTUM = 0.15, 0.9
WANTED_ACCURACY = 0.95
WANTED_LOSS_DIFFERENCE = 1e-4  # float32, sums in another order, hundreds of steps

# Variables that launchers set for the ranks they start.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class Digits(NamedTuple):
    """Images (n, 64) float32 from 0 to 1, labels (n,) int64."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits() -> Digits:
    """Return the digits in a fixed order; every fifth is for the test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    images, labels = images[order].astype(np.float32) / 16, labels[order]
    test = np.arange(len(labels)) % 5 == 0
    return Digits(images[~test], labels[~test], images[test], labels[test])


def initial_parameters() -> list[np.ndarray]:
    """Return a weight (in, out) and a bias (out,) for each layer, equal in every process."""
    generator = np.random.default_rng(SEED)
    parameters = []
    for inputs, outputs in itertools.pairwise(LAYERS):
        weight = generator.standard_normal((inputs, outputs)) * np.sqrt(1 / inputs)
        parameters += [weight.astype(np.float32), np.zeros(outputs, np.float32)]
    return parameters


class Model(Protocol):
    """The operations of a framework that training uses."""

    def gradients(self, images: np.ndarray, labels: np.ndarray, samples: float) -> list[Any]:
        """Return the loss and each parameter's gradient: the sums over the images, divided by
        `samples`."""

    def update(self, gradients: list[Any]) -> None:
        """Make one step of gradient descent with momentum."""

    def scores(self, images: np.ndarray) -> np.ndarray:
        """Return one row of ten scores for each image."""

    def parameters(self) -> list[np.ndarray]:
        """Return the present parameters."""


class NumpyModel:
    """A multilayer perceptron with its backward pass written out."""

    def __init__(self) -> None:
        self._parameters = initial_parameters()
        self._velocity = [np.zeros_like(p) for p in self._parameters]

    def _forward(self, images: np.ndarray) -> list[np.ndarray]:
        """Return the input of each layer, and the scores."""
        values = [images]
        weights, biases = self._parameters[::2], self._parameters[1::2]
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            value = values[-1] @ weight + bias
            values.append(value if layer == len(weights) - 1 else np.tanh(value))
        return values

    def gradients(self, images: np.ndarray, labels: np.ndarray, samples: float) -> list[Any]:
        *inputs, scores = self._forward(images)
        scores = scores - scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))
        loss = np.array([-logs[rows, labels].sum() / samples], np.float32)
        delta = np.exp(logs)
        delta[rows, labels] -= 1
        delta /= np.float32(samples)
        gradients: list[np.ndarray] = []
        for value, weight in zip(reversed(inputs), reversed(self._parameters[::2]), strict=True):
            gradients[:0] = [value.T @ delta, delta.sum(axis=0)]
            delta = (delta @ weight.T) * (1 - value * value)
        return [loss, *gradients]

    def update(self, gradients: list[Any]) -> None:
        for p, v, g in zip(self._parameters, self._velocity, gradients, strict=True):
            v *= MOMENTUM
            v += g
            p -= RATE * v

    def scores(self, images: np.ndarray) -> np.ndarray:
        return self._forward(images)[-1]

    def parameters(self) -> list[np.ndarray]:
        return self._parameters

    def state(self) -> list[np.ndarray]:
        """Return all that training changes."""
        return [*self._parameters, *self._velocity]


class TorchModel:
    """The same perceptron as a torch module."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        layers: list[Any] = []
        initial = initial_parameters()
        for weight, bias in zip(initial[::2], initial[1::2], strict=True):
            linear = torch.nn.Linear(*weight.shape)
            linear.weight.data = torch.from_numpy(weight.T.copy())
            linear.bias.data = torch.from_numpy(bias)
            layers += [linear, torch.nn.Tanh()]
        self._module = torch.nn.Sequential(*layers[:-1])
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=RATE, momentum=MOMENTUM)

    def gradients(self, images: np.ndarray, labels: np.ndarray, samples: float) -> list[Any]:
        torch = self._torch
        self._optimizer.zero_grad()
        scores = self._module(torch.from_numpy(images))
        loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels), reduction="sum")
        loss = loss / samples
        loss.backward()
        return [loss.detach().reshape(1), *(p.grad for p in self._module.parameters())]

    def update(self, gradients: list[Any]) -> None:
        self._optimizer.step()  # the gradients were averaged in place

    def scores(self, images: np.ndarray) -> np.ndarray:
        with self._torch.no_grad():
            return self._module(self._torch.from_numpy(images)).numpy()

    def parameters(self) -> list[np.ndarray]:
        return [p.detach().numpy() for p in self._module.parameters()]


MODELS: dict[str, Callable[[], Model]] = {"numpy": NumpyModel, "torch": TorchModel}


@dataclass
class History:
    """One training, epoch by epoch; times in seconds."""

    ranks: int
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    communication: list[float] = field(default_factory=list)

    def seconds(self) -> float:
        return sum(self.compute) + sum(self.communication)

    def share(self) -> float:
        """Return the share of the time that went into communication, including waits for other
        ranks."""
        return sum(self.communication) / self.seconds()


def average(arrays: list[Any]) -> None:
    """Replace every array by its average over the ranks."""
    dist.all_reduce_coalesced(arrays, op=dist.ReduceOp.AVG)


def train(
    model: Model, digits: Digits, epochs: int, rank: int, size: int, first: int = 0
) -> History:
    """Train on `size` ranks, of which this is `rank`, from epoch `first` on; rank 0 prints as it
    goes."""
    history = History(size)
    for epoch in range(first, epochs):
        losses, compute, communication = [], 0.0, 0.0
        shuffled = np.random.default_rng((SEED, epoch)).permutation(len(digits.train_labels))
        for start in range(0, len(shuffled), BATCH):
            began = time.perf_counter()
            batch = shuffled[start : start + BATCH]
            mine = batch[rank::size]
            # Over a fair share rather than over len(mine): then the average over the ranks
            # is the mean of the batch, whatever the number of ranks.
            gradients = model.gradients(
                digits.train_images[mine], digits.train_labels[mine], len(batch) / size
            )
            computed = time.perf_counter()
            if size > 1:
                average(gradients)
            averaged = time.perf_counter()
            model.update(gradients[1:])
            losses.append(float(gradients[0][0]))
            communication += averaged - computed
            compute += time.perf_counter() - began - (averaged - computed)
        scores = model.scores(digits.test_images)
        history.losses.append(float(np.mean(losses)))
        history.accuracies.append(float(np.mean(scores.argmax(axis=1) == digits.test_labels)))
        history.compute.append(compute)
        history.communication.append(communication)
        if rank == 0:
            print(
                f"  epoch {epoch + 1:2}/{epochs}  loss {history.losses[-1]:.4f}"
                f"  test accuracy {history.accuracies[-1]:6.2%}"
                f"  communication {communication / (compute + communication):4.0%}",
                flush=True,
            )
    return history


def replica_digests(model: Model) -> list[str]:
    """Return a hash of each rank's parameters, in rank order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(np.ascontiguousarray(parameter).tobytes())
    mine = np.frombuffer(digest.digest(), np.uint8)
    everyone = [np.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [other.tobytes().hex() for other in everyone]


def plot(path: Path, framework: str, several: History, single: History) -> None:
    """Plot the loss of both trainings, and how each epoch's time was spent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    epochs = np.arange(1, len(several.losses) + 1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.semilogy(epochs, single.losses, color="0.6", linewidth=5, label="1 rank")
    left.semilogy(epochs, several.losses, color="C0", label=f"world size {several.ranks}")
    left.set(xlabel="epoch", ylabel="training loss", title=f"Digits in {framework}")
    left.legend()
    compute = np.array(several.compute) * 1e3
    communication = np.array(several.communication) * 1e3
    right.bar(epochs, compute, color="C0", label="computing")
    right.bar(epochs, communication, bottom=compute, color="C1", label="communicating, waiting")
    right.plot(epochs, np.array(single.compute) * 1e3, "k_", label="1 rank, computing")
    right.set(xlabel="epoch", ylabel="milliseconds", title=f"Time on rank 0 of {several.ranks}")
    right.set_ylim(0, 1.3 * max(single.compute + list((compute + communication) / 1e3)) * 1e3)
    right.legend(loc="upper right")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def speed_up(several: History, single: History) -> str:
    """Return how much faster several ranks are than one, and if they are not, a reason."""
    ratio, cores = single.seconds() / several.seconds(), len(os.sched_getaffinity(0))
    if ratio > 1:
        return f"{several.ranks} ranks train {ratio:.2f} times as fast as one"
    if several.ranks > cores:
        why = f"they share {cores} cores"
    else:
        why = (
            f"{several.share():.0%} of their time is communication and waiting for each other, and "
            f"the machine may have other work (load {os.getloadavg()[0]:.1f} on {cores} cores)"
        )
    return f"{several.ranks} ranks are not faster than one here ({ratio:.2f} times): {why}"


def compare(framework: str, several: History, single: History, output: Path) -> list[str]:
    """Print and write the results; return the errors in them, as sentences."""
    difference = float(np.max(np.abs(np.subtract(several.losses, single.losses))))
    accuracy = several.accuracies[-1]
    print(
        f"  world size {several.ranks}: test accuracy {accuracy:.2%}, {several.seconds():.2f} s,"
        f" {several.share():.0%} of it communication\n"
        f"  1 rank: test accuracy {single.accuracies[-1]:.2%}, {single.seconds():.2f} s\n"
        f"  the losses differ by at most {difference:.1e}\n"
        f"  {speed_up(several, single)}"
    )
    output.mkdir(parents=True, exist_ok=True)
    picture = output / f"digits-{framework}.png"
    plot(picture, framework, several, single)
    numbers = {"several": asdict(several), "single": asdict(single)}
    (output / f"digits-{framework}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"  plot: {picture}", flush=True)
    wrong = []
    if accuracy < WANTED_ACCURACY:
        wrong.append(f"test accuracy {accuracy:.2%} is below {WANTED_ACCURACY:.0%}")
    if difference > WANTED_LOSS_DIFFERENCE:
        wrong.append(f"the losses of one rank differ by {difference:.1e}")
    return wrong


def run(options: argparse.Namespace) -> int:
    """Run a rank, and return the exit code."""
    frameworks = [options.framework]
    if options.framework == "auto":
        frameworks = ["numpy", *(["torch"] if importlib.util.find_spec("torch") else [])]
    digits = load_digits()
    dist.init_process_group(options.backend)
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    histories, wrong = {}, []
    for framework in frameworks:
        if rank == 0:
            print(f"{framework}, world size {size}, backend {backend!r}", flush=True)
        model = MODELS[framework]()
        histories[framework] = train(model, digits, options.epochs, rank, size)
        digests = replica_digests(model)
        if len(set(digests)) > 1:
            wrong.append(f"the replicas differ: {digests}")
        if rank == 0:
            print("  replicas, SHA-256 of the parameters:")
            for other, digest in enumerate(digests):
                print(f"    rank {other}  {digest[:32]}")
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        for framework, several in histories.items():
            print(f"{framework}, 1 rank, no process group", flush=True)
            single = train(MODELS[framework](), digits, options.epochs, rank=0, size=1)
            wrong += compare(framework, several, single, options.output)
    for sentence in wrong:
        print(f"rank {rank}: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def start(options: argparse.Namespace) -> None:
    """Replace this process with a launcher that starts this file on `ranks` ranks."""
    if options.backend == "mpi":
        beside = Path(sys.executable).with_name("mpirun")  # from pip, in the same environment
        mpirun = str(beside) if beside.exists() else "mpirun"
        launcher = [mpirun, "-n", str(options.ranks), sys.executable]
    else:
        launcher = [sys.executable, "-m", "cydist.run", "--nproc-per-node", str(options.ranks)]
    os.execvp(launcher[0], [*launcher, *sys.argv])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="when it starts itself (default: 2)")
    parser.add_argument("--backend", help="tcp or mpi (default: what the launcher suggests)")
    parser.add_argument("--framework", choices=("auto", *MODELS), default="auto")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    if not any(name in os.environ for name in RANK_VARIABLES):
        start(options)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())

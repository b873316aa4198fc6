"""Measures how sharp a minimum is: the mean rise of the loss if every parameter moves a little.

Models that are trained with large batches often end in sharp minima (Keskar et al. 2017, arXiv 1609.04836). That paper
looks for the largest rise near the minimum. This program takes the mean over random directions, which needs no
gradients. It prints this mean and the losses on training data and on held-out data. Compare the mean only with that of
another model with about the same training loss.

    python sharpness.py
    tessera launch -n 2 -- python sharpness.py
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

import tessera

SAMPLES, WIDTH, CLASSES = 256, 12, 3


def sharpness(engine: tessera.Engine, parameters: Iterable[nn.Parameter], loss: Callable[[], float], share: float = 0.1, draws: int = 4) -> float:
    """Returns the mean rise of `loss()` if each parameter moves by `share` of its norm in a random direction.

    `loss` returns the same number on all ranks. All ranks call this function, between steps. Afterwards the parameters
    have their old values again."""
    parameters, generator = list(parameters), torch.Generator().manual_seed(1)
    with engine.gathered():
        kept = [parameter.detach().clone() for parameter in parameters]

    def write(values: Iterable[torch.Tensor]) -> None:
        with engine.gathered(write=True), torch.no_grad():  # all ranks get rank 0's values
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)

    before, rises = loss(), []
    for _ in range(draws):
        directions = [torch.randn(value.shape, generator=generator).to(value) for value in kept]
        moves = [share * value.norm() / direction.norm() * direction for value, direction in zip(kept, directions, strict=True)]
        for sign in (1, -1):  # the mean over both signs does not contain the slope
            write(value + sign * move for value, move in zip(kept, moves, strict=True))
            rises.append(loss() - before)
    write(kept)
    return sum(rises) / len(rises)


def made_up_data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns samples [SAMPLES, WIDTH] and their classes. A fifth of the classes are drawn at random."""
    teacher = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    drawn = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return x, torch.where(torch.rand(SAMPLES, generator=generator) < 0.2, drawn, (x @ teacher).argmax(1))


def train(batch: int, epochs: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    engine = tessera.Engine(model, {"units": {"classes": ["Linear"]}, "optimizer": {"type": "adam", "lr": 1e-2, "weight_decay": 0}})
    training, held_out = made_up_data(seed=2), made_up_data(seed=3)
    own = slice(tessera.rank(), None, tessera.world_size())

    def loss_of(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(part[0][own]), part[1][own])

    def mean_loss(data: tuple[torch.Tensor, torch.Tensor]) -> float:
        return engine.evaluate([data], loss_of).loss

    order = torch.Generator().manual_seed(4)
    for _ in range(epochs):
        for rows in torch.randperm(SAMPLES, generator=order).split(batch):
            engine.backward(loss_of((training[0][rows], training[1][rows])))
            engine.step()
    found = sharpness(engine, model.parameters(), lambda: mean_loss(training))
    before, after = mean_loss(training), mean_loss(held_out)
    if tessera.rank() == 0:
        print(f"batch {batch:3}  loss {before:.4f}  held out {after:.4f}  sharpness {found:.5f}", flush=True)
    engine.close()


def main() -> None:
    torch.set_num_threads(1)
    for batch, epochs in ((16, 10), (128, 30)):  # both end with about the same training loss
        train(batch, epochs)


if __name__ == "__main__":
    main()

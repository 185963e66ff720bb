"""Speed of the training loop against the same loop written by hand, and against data loaders."""

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.timing import medians, row
from pliant import data, models, streams
from pliant.training import Learner, Settings, train_epoch

EXAMPLES, BATCH = 12_800, 256


class PilImages(Dataset[tuple[Tensor, int]]):
    """A data set of PIL images that are converted and normalized one by one."""

    def __init__(self, images: Tensor, labels: Tensor, mean: float, std: float) -> None:
        self.images = [Image.fromarray(image.squeeze(0).numpy()) for image in images]
        self.labels = labels.tolist()
        self.mean, self.std = mean, std

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, image.height, image.width)
        return pixels.to(torch.float32).div(255).sub_(self.mean).div_(self.std), self.labels[index]


def main() -> None:
    dataset = data.load("mnist", first=EXAMPLES)
    train = dataset.train
    scale, shift = train.scale, train.shift
    images, labels = train.x[:EXAMPLES], train.y
    task = streams.create("single", dataset, epochs=10**6)[0]

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = models.create("mlp", dataset.shape, 10)
        return model, torch.optim.Adam(model.parameters(), 1e-3, fused=True)

    learner = Learner(models.create("mlp", dataset.shape, 10), Settings(batch_size=BATCH))

    def ours() -> None:
        train_epoch(learner, task, seed=0)
        learner.epoch += 1

    model, optimizer = fresh()

    def by_hand() -> float:
        total, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for index in torch.randperm(EXAMPLES).split(BATCH):
            x = images.index_select(0, index).to(torch.float32).mul_(scale).add_(shift)
            y = labels.index_select(0, index)
            optimizer.zero_grad()
            logits = model(x)
            loss = cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(y)
            correct += (logits.argmax(1) == y).sum()
        return float(total) + int(correct)

    def loader_loop(loader: DataLoader[tuple[Tensor, Tensor]]) -> None:
        for x, y in loader:
            loader_optimizer.zero_grad()
            cross_entropy(loader_model(x), y).backward()
            loader_optimizer.step()

    loader_model, loader_optimizer = fresh()
    normalized, _ = train.batch(torch.arange(EXAMPLES))
    tensors = DataLoader(TensorDataset(normalized, labels), BATCH, shuffle=True)
    mean, std = float(-shift / scale / 255), float(1 / scale / 255)
    pictures = DataLoader(PilImages(images, labels, mean, std), BATCH, shuffle=True)

    seconds = medians({"ours": ours, "by hand": by_hand}, rounds=41)
    row(
        "throughput: pliant.training / the same loop by hand, MNIST-MLP", seconds["by hand"] / seconds["ours"], "≥ 0.95"
    )
    others = {"ours": ours, "tensors": lambda: loader_loop(tensors), "pictures": lambda: loader_loop(pictures)}
    seconds = medians(others, rounds=5)
    row("throughput: pliant.training / DataLoader over tensors", seconds["tensors"] / seconds["ours"], "")
    row("throughput: pliant.training / DataLoader over PIL images", seconds["pictures"] / seconds["ours"], "")

"""Tokens per second of the training loop on text, against the same loop written by hand."""

import torch
from torch.nn.functional import cross_entropy

from benchmarks.timing import medians, row
from pliant import data, models, streams
from pliant.training import Learner, Settings, train_epoch

BATCH, CLIP = 16, 1.0


def main() -> None:
    dataset = data.load("python_docs", characters=40_000, window=64)
    x, y = dataset.train.x, dataset.train.y
    task = streams.create("single", dataset, epochs=10**6)[0]
    settings = Settings("adamw", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, batch_size=BATCH, clip=CLIP)

    def gpt() -> torch.nn.Module:
        return models.create("gpt", dataset.shape, len(dataset.classes), depth=2, width=64, seed=0)

    learner = Learner(gpt(), settings)

    def ours() -> None:
        train_epoch(learner, task, seed=0)
        learner.epoch += 1

    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True)

    def by_hand() -> float:
        total, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for index in torch.randperm(len(x)).split(BATCH):
            targets = y.index_select(0, index)
            optimizer.zero_grad()
            logits = model(x.index_select(0, index))
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            total += loss.detach() * len(targets)
            correct += (logits.argmax(-1) == targets).sum()
        return float(total) + int(correct)

    seconds = medians({"ours": ours, "by hand": by_hand}, rounds=9, warmup=1)
    row("tokens/s: pliant.training / the same loop by hand, GPT 2 x 64", seconds["by hand"] / seconds["ours"], "≥ 0.95")

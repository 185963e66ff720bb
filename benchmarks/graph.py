"""Time of the analysis of large models, and cost of SWR in a step of a residual network."""

import contextlib
import io
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from benchmarks.diagnostics import high_water
from benchmarks.steps import training_step
from benchmarks.timing import medians, row
from pliant import SWR
from pliant.anatomy import analyze
from pliant.models import create


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = relu(self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))))
        return relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet50() -> tuple[nn.Module, Any]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        for position in range(depth):
            layers.append(Bottleneck(channels, 64 * 2**stage, 2 if stage and not position else 1))
            channels = 256 * 2**stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers), torch.randn(2, 3, 224, 224)


def gpt2_small() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    # torch.export alone cannot return the cache of keys and values.
    return GPT2LMHeadModel(GPT2Config(use_cache=False)), {"input_ids": torch.randint(0, 50257, (1, 64))}


def against_export(what: str, build: Callable[[], tuple[nn.Module, Any]], rounds: int) -> None:
    """Compare the analysis, of which most of SWR's construction consists, with torch.export alone."""
    model, example = build()
    args, kwargs = ((), example) if isinstance(example, dict) else ((example,), {})
    times = medians(
        {
            "analysis": lambda: analyze(model, example).plan(),
            "export": lambda: torch.export.export(model, args, kwargs, strict=False),
        },
        rounds=rounds,
        warmup=1,
    )
    row(f"analysis and plan / torch.export alone, {what}", times["analysis"] / times["export"], "≤ 1.7")


def analysis_time(what: str, build: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, example = build()
    start, wall = time.process_time(), time.perf_counter()
    graph = analyze(model, example)
    analyzed = time.process_time()
    plan = graph.plan()
    done, passed = time.process_time(), time.perf_counter() - wall
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{what}, {count:.0f} M parameters, {len(graph.blocks)} blocks: analysis {analyzed - start:.1f} s + plan "
        f"{done - analyzed:.1f} s of one core ({passed:.1f} s on the clock of a shared machine); {len(plan.wishes)} "
        f"wishes, {len(plan.targets)} targets"
    )


def billion() -> None:
    """Analyze a GPT of 1 B parameters, built on the meta device. To be run in a process of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=33, n_embd=1536, n_head=16))
        example = {"input_ids": torch.zeros(1, 64, dtype=torch.int64)}
    torch.set_num_threads(1)
    start = time.process_time()
    graph = analyze(model, example)
    graph.plan()
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    print(
        f"GPT-2 of {count:.2f} B parameters on the meta device, {len(graph.blocks)} blocks: analysis and plan "
        f"{time.process_time() - start:.1f} s of one core (limit 60), peak memory of the process "
        f"{high_water():.2f} GiB (limit 2)"
    )


def in_own_process(measure: Callable[[], None]) -> None:
    """Call a function in a new process and print what it prints."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(_printed, (measure,)), end="")


def _printed(measure: Callable[[], None]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        measure()
    return printed.getvalue()


def swr_on_resnet18() -> None:
    """Time SWR's own step and the training step separately.

    A training step takes more than a second and varies by more than SWR's few milliseconds, so the difference of steps
    with and without SWR would be noise.
    """
    batch = torch.randn(32, 3, 32, 32)
    model = create("resnet18", (3, 32, 32), 10)
    step, _ = training_step(model, batch)
    times = medians({"step": step, "swr": SWR(model, batch[:2], lam=1e-3).step}, rounds=20)
    row("(training step + SWR's step) / training step, ResNet-18, batch 32", 1 + times["swr"] / times["step"], "≤ 1.01")


def main() -> None:
    """Print the times and the ratio of the design's limits."""
    torch.manual_seed(0)
    print("seconds of one core, limit 10:")
    first = time.process_time()
    analyze(nn.Linear(2, 2), torch.ones(1, 2))
    print(
        f"the first analysis in a process, of one layer: {time.process_time() - first:.1f} s, imports of torch.export"
    )
    analysis_time("GPT-2 small", gpt2_small)
    analysis_time("ResNet-50", resnet50)
    in_own_process(billion)
    print()
    against_export("MLP-3×100", lambda: (create("mlp", (1, 28, 28), 10), torch.randn(2, 1, 28, 28)), 15)
    against_export("ResNet-50", resnet50, 3)
    against_export("GPT-2 small", gpt2_small, 3)
    print()
    swr_on_resnet18()

"""`pliant treat`: which remedy works best from a checkpoint, and the code that applies it."""

from pathlib import Path
from typing import Annotated

import typer

from pliant._key_values import read_options

EPILOG = (
    "Examples:\n\n- `pliant treat checkpoint.pt --model mine.py:build --data new/ --old-data old/`\n\n"
    "- `pliant treat checkpoint.pt --model resnet18 --data new/ --methods fire,l2_init:lam=1e-2|1e-3`"
)
SEARCH, TRAINING, RUNS = "What is tried", "Training, as you train", "Where it runs"
"""Panels of `--help`."""


def treat_command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="FILE", help="The weights: a safetensors file, or written by torch.save.")
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="Network: see `pliant list models`, or file.py:function.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="What to train on tonight: see `pliant list data`; a path, or file.py:function."
        ),
    ],
    old_data: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the checkpoint has learned: shows what is forgotten."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            rich_help_panel=SEARCH,
            metavar="LIST",
            help="`auto`: eight methods; `all`; or a list: shrink_perturb,l2_init:lam=1e-2|1e-3.",
        ),
    ] = "auto",
    budget: Annotated[
        str,
        typer.Option(
            rich_help_panel=SEARCH,
            metavar="TIME",
            help="About how long it may take: 90s, 30m, 1h30m; `none` tries everything.",
        ),
    ] = "30m",
    seeds: Annotated[
        int, typer.Option(rich_help_panel=SEARCH, metavar="N", help="Seeds that test the best remedy.")
    ] = 5,
    epochs: Annotated[
        int, typer.Option(rich_help_panel=TRAINING, metavar="N", help="Epochs of training on the data.")
    ] = 10,
    scratch_epochs: Annotated[
        int | None,
        typer.Option(rich_help_panel=TRAINING, metavar="N", help="Epochs of training from scratch. Default: --epochs."),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(rich_help_panel=TRAINING, metavar="NAME", help="adam, adamw or sgd.")
    ] = "adam",
    lr: Annotated[float, typer.Option(rich_help_panel=TRAINING, metavar="X", help="Learning rate.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(rich_help_panel=TRAINING, metavar="N", help="Examples per step.")] = 64,
    key: Annotated[str, typer.Option(metavar="KEY", help="The place of the weights in the checkpoint.")] = "",
    optimizer_state: Annotated[
        str,
        typer.Option(
            rich_help_panel=TRAINING,
            metavar="KEY",
            help="The place of the optimizer's state in the checkpoint, e.g. optimizer. Default: a new optimizer.",
        ),
    ] = "",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            rich_help_panel=TRAINING,
            metavar="KEY=VALUE",
            help="Other options: data.size=32, model.width=8, training.momentum=0.9 (`pliant list training`).",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(rich_help_panel=RUNS, metavar="NAME", help="Where to compute: cpu, cuda, …")
    ] = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=RUNS,
            metavar="FOLDER",
            help="Folder of the runs; an interrupted folder resumes. Default: runs/treat-…",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(rich_help_panel=RUNS, metavar="N", help="Processes. Default: the cores.")
    ] = None,
) -> None:
    """Find out what to do with a checkpoint before it learns new data: continue, apply a remedy, train from scratch?

    Settings compete on held-out data within --budget. The best one is tested on other seeds.
    """
    from pliant._console import make_console
    from pliant.treat import treat

    console = make_console()
    options = read_options(setting or (), "data", "model", "training")
    try:
        treatment = treat(
            checkpoint,
            model={"name": model, **options["model"]},
            data={"name": data, **options["data"]},
            old_data=old_data,
            methods=methods,
            budget=None if budget == "none" else budget,
            seeds=seeds,
            epochs=epochs,
            scratch_epochs=scratch_epochs,
            training={"optimizer": optimizer, "lr": lr, "batch_size": batch_size, **options["training"]},
            key=key,
            optimizer_state=optimizer_state,
            out=out,
            workers=workers,
            device=device,
            progress=console,
        )
        (page,) = treatment.save(treatment.folder / "treatment.html")
        treatment.report.print(console)
        console.print(f"\n{treatment.code}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("stopped; the same command resumes")
        raise typer.Exit(130) from None
    step = "paste the code into tonight's training" if treatment.action == "apply" else "open the page"
    console.print(f"next: {step}; the same command with more --seeds goes on", markup=False, soft_wrap=True)
    if any(status != "finished" for status in treatment.statuses.values()):
        console.print("some runs did not finish; result.json in their folders says why")
    if treatment.action == "none":
        raise typer.Exit(1)

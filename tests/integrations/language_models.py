"""Tiny language models of transformers, data for them, and the Trainer around them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

IDS = torch.randint(1, 20, (24, 8), generator=torch.Generator().manual_seed(0))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 12, "n_head": 2, "n_positions": 8, "vocab_size": 20, "n_inner": 30}
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"vocab_size": 20, "intermediate_size": 30, "max_position_embeddings": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, bos_token_id=0, eos_token_id=0, pad_token_id=None))


MODELS = {"gpt2": gpt2, "llama": llama}


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[index], "labels": IDS[index]}


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **settings})


def trainer(model: nn.Module | None, folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    init = settings.pop("model_init", None)
    return Trainer(
        model, arguments(folder, **settings), train_dataset=Tokens(), callbacks=list(callbacks), model_init=init
    )

"""
Hugging Face Trainer
====================

A small GPT-2 learns sequences whose rule changes after half of the training. One callback attaches L2 Init, and lets
FIRE act when the rule changes.
"""

import tempfile

import matplotlib.pyplot as plt
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import pliant
from pliant.integrations.transformers import PliantCallback

STEPS, BATCH, LENGTH, WORDS = 60, 32, 12, 16


# %%
# Each word follows from the one before it by a fixed table, which changes in the middle.
def make_data() -> list[dict[str, torch.Tensor]]:
    """Return one example a place in each batch."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for half in range(2):
        follows = torch.randperm(WORDS, generator=torch.Generator().manual_seed(half))
        for start in torch.randint(WORDS, (STEPS // 2 * BATCH,), generator=draw):
            words = [start]
            while len(words) < LENGTH:
                words.append(follows[words[-1]])
            rows.append({"input_ids": torch.stack(words), "labels": torch.stack(words)})
    return rows


# %%
# Only the callback is new. Its state is saved in Trainer's checkpoints.
set_seed(0)
shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
callback = PliantCallback(lambda model: [pliant.L2Init(model, lam=1e-3), pliant.FIRE(model)], at=[STEPS // 2])
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=STEPS,
    per_device_train_batch_size=BATCH,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    logging_steps=2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    train_sampling_strategy="sequential",
)
trainer = Trainer(model, arguments, train_dataset=make_data(), callbacks=[callback])
trainer.train()
print(callback.receipts[0][1])

# %%
# The loss falls, jumps when the rule changes, and falls again.
log = [entry for entry in trainer.state.log_history if "loss" in entry]
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.plot([entry["step"] for entry in log], [float(entry["loss"]) for entry in log])
axes.axvline(STEPS // 2, color="C7", linestyle=":", label="the rule changes, FIRE acts")
axes.set(xlabel="step", ylabel="training loss")
axes.legend()

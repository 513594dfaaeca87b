"""A training under transformers' Trainer: transformers_training.py FOLDER."""

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Numbers(Dataset[dict[str, Tensor]]):
    """Sequences of one number each. The label tells whether it is even."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((8,), index), "labels": torch.tensor(index % 2)}


if __name__ == "__main__":
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)  # rank 0 alone would make it
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=4,
        save_steps=3,
        logging_steps=3,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=1,
    )
    torch.manual_seed(1)
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Numbers())
    made = trainer.train().global_step
    rank, world_size = arguments.process_index, arguments.world_size
    print(f"rank {rank} of {world_size}: {made} steps\n", end="", flush=True)

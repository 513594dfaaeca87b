"""A training under transformers that resumes from its newest checkpoint: `hugging_face.py FOLDER`."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Numbers(Dataset[dict[str, Tensor]]):
    """Sequences of one number each. The label tells whether it is even."""

    def __len__(self) -> int:
        return 40

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
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        use_cpu=True,
        max_steps=24,
        per_device_train_batch_size=4,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(1)
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Numbers())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(sys.argv[1]))

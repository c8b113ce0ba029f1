"""Trains a tiny GPT-2 with Hugging Face's Trainer; only the first import is new.

    torchrun --nproc-per-node 2 huggingface_trainer.py

The model starts from random weights and counts modulo 16, so nothing is downloaded.
"""

import tempfile

import perseus  # isort: skip  # noqa: F401 - process groups run on Perseus from here on
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Counting(torch.utils.data.Dataset):
    """Sequences such as 3, 4, 5, 6, …"""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 16
        return {"input_ids": tokens, "labels": tokens}


def main():
    set_seed(42)
    config = GPT2Config(
        vocab_size=16, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=8, num_train_epochs=4, learning_rate=1e-2,
            use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Counting())
        loss = trainer.train().training_loss
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    if trainer.is_world_process_zero():
        alike = all(torch.equal(other, weights) for other in everywhere)
        print(f"backend {dist.get_backend()}, loss {loss:.6f}")
        print(f"the ranks' weights are {'equal' if alike else 'different'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Private training with the Trainer of Transformers: adapters of peft on a language model.

python examples/private_trainer.py
"""

import tempfile

import peft
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator

from gradrein import private
from gradrein.integrations.transformers import PrivateTrainer


class Language(PrivateTrainer):
    def losses(self, model, inputs):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), inputs["labels"][:, 1:], reduction="none").mean(1)


def main():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(LlamaForCausalLM(config), lora)
    rows = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(48)]
    loader = DataLoader(rows, batch_size=8, collate_fn=default_data_collator)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options = {"max_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"}
    run = private.Private(model, optimizer, loader, **options)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
        )
        Language(run, args=args).train()
    print(f"{run.steps} steps, epsilon {run.epsilon():.2f}")


if __name__ == "__main__":
    main()

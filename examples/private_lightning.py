"""Private training with Lightning: a module that optimizes by hand, and a callback.

python examples/private_lightning.py
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from gradrein import private
from gradrein.integrations.lightning import PrivateCallback


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = torch.nn.Linear(8, 3)
        self.run = None

    def training_step(self, batch, index):  # noqa: ARG002
        x, y = batch
        self.run.step(F.cross_entropy(self.net(x), y, reduction="none"))

    def configure_optimizers(self):
        return self.run.optimizer


def main():
    loader = DataLoader(TensorDataset(torch.randn(200, 8), torch.randint(3, (200,))), batch_size=20)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"max_norm": 1.0, "epsilon": 4.0, "delta": 1e-3, "epochs": 2, "accountant": "rdp"}
    model.run = private.Private(model, optimizer, loader, **options)
    trainer = pl.Trainer(max_epochs=2, callbacks=[PrivateCallback(model.run)], logger=False, enable_checkpointing=False)
    trainer.fit(model, model.run.loader)
    print(f"{model.run.steps} steps, epsilon {model.run.epsilon():.2f}")


if __name__ == "__main__":
    main()

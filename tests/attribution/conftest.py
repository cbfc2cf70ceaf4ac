import pytest
import torch
from torch import nn

import gradrein


class Samples:
    """A small classifier, its data, and the projected gradients of some of its samples."""

    def __init__(self, count=40):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
        self.x, self.y = torch.randn(count, 12), torch.randint(3, (count,))

    def per_sample(self, part=slice(None)):
        losses = nn.functional.cross_entropy(self.model(self.x[part]), self.y[part], reduction="none")
        return gradrein.per_sample(losses, self.model)

    def project(self, part=slice(None), size=64, **options):
        return self.per_sample(part).project(size, **options)


@pytest.fixture
def samples():
    return Samples()


@pytest.fixture
def store(tmp_path, samples):
    made = gradrein.attribution.GradientStore(tmp_path / "index")
    for start in range(0, 40, 10):
        part = slice(start, start + 10)
        made.add(range(start, start + 10), samples.project(part))
    return made

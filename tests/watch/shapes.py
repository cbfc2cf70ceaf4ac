"""Training scripts in the shapes that people write, each unchanged by being watched."""

_HEAD = "import math, random, sys\nimport torch\nfrom torch import nn\ntorch.manual_seed(0)\n"

GAN = """
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
for step in range(12):
    real, fake = torch.randn(16, 2) + 3, maker(torch.randn(16, 4))
    judge.zero_grad()
    loss_real = criterion(judge(real), torch.ones(16, 1))
    loss_real.backward()
    loss_fake = criterion(judge(fake.detach()), torch.zeros(16, 1))
    loss_fake.backward()
    judge_optimizer.step()
    maker.zero_grad()
    loss = criterion(judge(fake), torch.ones(16, 1))
    loss.backward()
    maker_optimizer.step()
    print(step, f"{loss_real.item() + loss_fake.item():.6f} {loss.item():.6f}")
"""

LBFGS = """
net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.linspace(-2, 2, 40)[:, None]
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.8, max_iter=5, line_search_fn="strong_wolfe")
for step in range(6):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), x.sin())
        loss.backward()
        return loss
    print(step, f"{float(optimizer.step(closure)):.6f}")
"""

AMP = """
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(10):
    x, y = torch.randn(16, 8), torch.randint(3, (16,))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    if step == 4:
        net[0].weight.grad[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, f"{loss.item():.6f} {scaler.get_scale()}")
"""

ACCUMULATION = """
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
for step in range(6):
    total = 0.0
    for micro in range(4):
        x = torch.randn(4, 8)
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean() / 4
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(step, f"{total:.6f} {schedule.get_last_lr()[0]:.6f}")
"""

REINFORCE = """
random.seed(0)
policy = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(8):
    place, log_probs, rewards = 0.0, [], []
    for t in range(10):
        choice = torch.distributions.Categorical(logits=policy(torch.tensor([place, t / 10.0])))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        place += 0.3 * (2 * action.item() - 1) + random.gauss(0, 0.05)
        rewards.append(-abs(place - 1))
    returns, so_far = [], 0.0
    for reward in reversed(rewards):
        so_far = reward + 0.95 * so_far
        returns.insert(0, so_far)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    optimizer.zero_grad()
    loss = torch.stack([-p * r for p, r in zip(log_probs, returns)]).sum()
    loss.backward()
    optimizer.step()
    print(episode, f"{loss.item():.6f} {sum(rewards):.6f}")
"""

RECURRENT = """
class Model(nn.Module):
    def __init__(self, letters=12, width=16):
        super().__init__()
        self.encoder = nn.Embedding(letters, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=0.2)
        self.decoder = nn.Linear(width, letters)
        self.decoder.weight = self.encoder.weight
    def forward(self, x, hidden):
        out, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(out), hidden
model, data, lr = Model(), torch.randint(12, (61, 4)), 5.0
hidden = None
for i in range(0, 60, 10):
    model.zero_grad()
    if hidden is not None:
        hidden = tuple(h.detach() for h in hidden)
    out, hidden = model(data[i : i + 10], hidden)
    loss = nn.functional.cross_entropy(out.flatten(0, 1), data[i + 1 : i + 11].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    print(i, f"{loss.item():.6f} {norm.item():.6f}")
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for i in range(0, 60, 10):
    optimizer.zero_grad()
    hidden = tuple(h.detach() for h in hidden)
    out, hidden = model(data[i : i + 10], hidden)
    loss = nn.functional.cross_entropy(out.flatten(0, 1), data[i + 1 : i + 11].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(i, f"{loss.item():.6f} {norm.item():.6f}")
"""

WORKERS = """
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(32, 4))
    for epoch in range(2):
        for (x,) in DataLoader(data, batch_size=8, num_workers=2):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
        print(epoch, f"{loss.item():.6f}")
    raise RuntimeError("at the end")
"""

# Steps by optimizer, and the exit code.
EXPECTED = {
    "gan": (GAN, [12, 12], 0),
    "lbfgs": (LBFGS, [6], 0),
    "amp": (AMP, [9], 0),
    "accumulation": (ACCUMULATION, [6], 0),
    "reinforce": (REINFORCE, [8], 0),
    "recurrent": (RECURRENT, [6], 0),
    "workers": (WORKERS, [8], 1),
}


def write(folder):
    """Write each as a script; return them."""
    found = {}
    for name, (text, steps, code) in EXPECTED.items():
        path = folder / f"{name}.py"
        path.write_text(_HEAD + text)
        found[name] = (path, steps, code)
    return found

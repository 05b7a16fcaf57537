"""What the Python blocks of documents use and do not define, by name: code that defines it, run before the block.

A block is a part of a script that the reader has. Its names here are those of that script, as small as they can be.
"""

from __future__ import annotations

from collections.abc import Sequence

ALWAYS = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
import bagua_core as bagua
bagua.init_process_group()
torch.manual_seed(0)
"""

# name: (names that it needs, code)
DEFINITIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "Net": ((), "def Net(): return torch.nn.Linear(4, 2)"),
    "net": (("Net",), "net = Net()"),
    "optimizer": (("net",), "optimizer = torch.optim.SGD(net.parameters(), lr=0.05)"),
    "scheduler": (("optimizer",), "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)"),
    "scaler": ((), "scaler = torch.amp.GradScaler('cpu', enabled=False)"),
    "dataset": (
        (),
        "dataset = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randint(0, 2, (256,)))",
    ),
    "held_out": (("dataset",), "held_out = torch.utils.data.Subset(dataset, range(100))"),
    "model": (("net", "optimizer"), "model = bagua.DistributedDataParallel(net, optimizers=[optimizer])"),
    "loader": (("dataset",), "loader = bagua.ElasticDataLoader(dataset, global_batch_size=64, seed=0)"),
    # a model whose lower layer a block reads
    "layers": ((), "net = torch.nn.Module()\nnet.lower = torch.nn.Linear(4, 3)"),
    # Hugging Face's way: what accelerate prepares
    "unwrapped": (("net", "optimizer"), "model = net"),
    "classifier": (
        (),
        "class Classifier(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 2)\n"
        "    def forward(self, values, labels):\n"
        "        scores = self.layer(values)\n"
        "        return {'loss': F.cross_entropy(scores, labels), 'logits': scores}\n"
        "model = Classifier()\n"
        "train = [{'values': torch.randn(4), 'labels': torch.tensor(i % 2)} for i in range(64)]\n"
        "validation = train[:16]",
    ),
    "plain_loader": (("dataset",), "loader = DataLoader(dataset, batch_size=16)"),
    # the original's interface
    "original": ((), "import bagua_core.torch_api as bagua"),
    "train_set": (("dataset",), "train_set = dataset"),
    # a model of blocks that returns its loss, and its samples
    "blocks_net": (
        (),
        "class Blocks(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])\n"
        "    def forward(self, x, y):\n"
        "        for block in self.blocks:\n"
        "            x = block(x)\n"
        "        return F.mse_loss(x, y)\n"
        "net = Blocks()",
    ),
    "pairs": ((), "dataset = torch.utils.data.TensorDataset(torch.randn(128, 4), torch.randn(128, 4))"),
    "regression": ((), "x, y = torch.randn(8, 4), torch.randn(8, 2)"),
    # samples without labels, of which the last batch of 64 has one
    "images": ((), "images = torch.randn(193, 4)"),
    "augment": ((), "def augment(x): return x + 0.1 * torch.randn_like(x)"),
    # a training with a real step, around what a block does in its loop body
    "step": (
        ("optimizer", "model"),
        "def step(x, y):\n"
        "    optimizer.zero_grad()\n"
        "    loss = F.cross_entropy(model(x), y)\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    return loss",
    ),
    "compute": (
        ("step",),
        "def compute(): return step(torch.randn(8, 4), torch.randint(0, 2, (8,)))",
    ),
    "micro_batches": ((), "def micro_batches(step): return torch.randn(2, 16, 4)"),
    "loss_of": ((), "def loss_of(model, samples): return model(samples).square().sum() / 32"),
    "build": (
        ("dataset",),
        "def build(learning_rate):\n"
        "    net = torch.nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)\n"
        "    model = bagua.DistributedDataParallel(net, optimizers=[optimizer])\n"
        "    return model, bagua.ElasticDataLoader(dataset, global_batch_size=64, seed=0)",
    ),
    "train": (
        (),
        "def train(model, loader):\n"
        "    for epoch in loader.epochs(1):\n"
        "        for x, y in loader:\n"
        "            F.cross_entropy(model(x), y).backward()",
    ),
    "root": ((), "root = 'faces'"),
    "Faces": (
        (),
        "class Faces(torch.utils.data.Dataset):\n"
        "    def __init__(self, root): pass\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index): return torch.ones(4) * index",
    ),
    "random_crop": ((), "def random_crop(sample): return sample"),
    "rows": ((), "rows = torch.ones(bagua.get_world_size(), 3)"),
    "cut_again": ((), "def cut_again(world_size): return torch.ones(world_size, 3)"),
    "download": ((), "def download(): pass"),
    "new_name": ((), "def new_name(): return 'a name'"),
    "run_name": ((), "run_name = 'a name'"),
    "SummaryWriter": (
        (),
        "class SummaryWriter:\n"
        "    def __init__(self, folder): pass\n"
        "    def add_scalar(self, name, value, step): pass",
    ),
}


def before(names: Sequence[str]) -> str:
    """Code that defines `names` and what they need, each once. Raises KeyError for a name that is not known here."""
    order: list[str] = []

    def add(name: str) -> None:
        needed, _ = DEFINITIONS[name]
        for other in needed:
            add(other)
        if name not in order:
            order.append(name)

    for name in names:
        add(name)
    return "\n".join([ALWAYS, *(DEFINITIONS[name][1] for name in order)]) + "\n"

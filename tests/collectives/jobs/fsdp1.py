"""FSDP by FullyShardedDataParallel, with prefetch in both directions."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = FullyShardedDataParallel(
    nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 1)),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    device_id=torch.device("cpu"),
    use_orig_params=True,
    forward_prefetch=True,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(100 + dist.get_rank())
for step in range(int(os.environ["STEPS"])):
    x = torch.randn(32, 64, generator=data)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(step, loss.item().hex(), total.item().hex(), norm.item().hex(), flush=True)
print(sum(parameter.double().sum() for parameter in model.parameters()).item().hex())
dist.destroy_process_group()

"""DDP with small buckets, object collectives and barriers."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 1)), bucket_cap_mb=0.02
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.Generator().manual_seed(100 + rank)
for step in range(int(os.environ["STEPS"])):
    x = torch.randn(32, 64, generator=data)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(step, loss.item().hex(), total.item().hex(), flush=True)
    if step % 7 == 3:
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "loss": loss.item()})
        print(objects)
    if step % 11 == 5:
        dist.barrier()
    if step % 13 == 6:
        dist.monitored_barrier()
print(dist.get_backend(), sum(parameter.double().sum() for parameter in model.parameters()).item().hex())
dist.destroy_process_group()

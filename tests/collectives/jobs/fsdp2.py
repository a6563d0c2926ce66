"""FSDP by fully_shard; with TP=2 also tensor parallel, on a mesh of two dimensions."""

import os

import streams
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


dist.init_process_group("gloo")
tensor_parallel = int(os.environ.get("TP", "1"))
torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(64, 1))
size = dist.get_world_size()
if tensor_parallel > 1:
    mesh = init_device_mesh("cpu", (size // tensor_parallel, tensor_parallel), mesh_dim_names=("data", "tensor"))
    data_mesh = mesh["data"]
    for block in model[:3]:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
else:
    data_mesh = init_device_mesh("cpu", (size,))
for module in (*model[:3], model):
    fully_shard(module, mesh=data_mesh, reshard_after_forward=not streams.OLD)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
data = torch.Generator().manual_seed(100 + dist.get_rank() // tensor_parallel)
for step in range(int(os.environ["STEPS"])):
    x = torch.randn(32, 64, generator=data)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, group=data_mesh.get_group())
    print(step, loss.item().hex(), total.item().hex(), flush=True)
print(sum(parameter.full_tensor().double().sum() for parameter in model.parameters()).item().hex())
dist.destroy_process_group()

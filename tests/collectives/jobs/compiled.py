"""A compiled graph with functional collectives; torch's own checkpoints, written and read, also asynchronously."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import _functional_collectives as functional

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group(list(range(size)))
torch.manual_seed(0)
weight = torch.randn(64, 64) / 8


@torch.compile(backend="aot_eager", fullgraph=True)
def layer(x: torch.Tensor) -> torch.Tensor:
    gathered = functional.all_gather_tensor(x, 0, group.group_name)
    return functional.all_reduce(torch.relu(x @ weight), "sum", group.group_name) * 0.1 + gathered.sum(0)


data = torch.Generator().manual_seed(rank)
x = torch.randn(8, 64, generator=data)
folder = f"/tmp/dcp-{os.environ['MASTER_PORT']}"
for step in range(int(os.environ["STEPS"])):
    x = torch.tanh(layer(x)) + torch.randn(8, 64, generator=data)
    print(step, x.double().sum().item().hex(), flush=True)
    if step % 25 == 10:
        dcp.save({"x": x.clone(), "step": step}, checkpoint_id=folder, process_group=group)
        loaded = {"x": torch.zeros(8, 64), "step": 0}
        dcp.load(loaded, checkpoint_id=folder, process_group=group)
        print(loaded["step"], loaded["x"].sum().item().hex())
    if step % 50 == 35:
        future = dcp.async_save({"x": x.clone()}, checkpoint_id=f"{folder}-later", process_group=group)
        x = torch.tanh(x)
        future.result()
dist.destroy_process_group()

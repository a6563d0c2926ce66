"""Every kind of operation: point to point, objects, kept works, coalesced, groups that come and go, the store."""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

SIZE = 1200
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data = torch.Generator().manual_seed(100 + rank)
after, before = (rank + 1) % size, (rank - 1) % size
pairs = [dist.new_group([i, (i + 1) % size]) for i in range(size)] if size > 2 else []
destroyed = []  # the destructor of torch 2.6 may wait, with the GIL, for a thread that waits for the GIL
store = dist.distributed_c10d._get_default_store()


def show(name: str, tensor: torch.Tensor) -> None:
    print(name, tensor.double().sum().item().hex(), flush=True)


def summed(tensor: torch.Tensor, **options: object) -> torch.Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor, **options)
    return tensor


def point_to_point(step: int, x: torch.Tensor) -> None:
    got = torch.empty(SIZE)
    works = [dist.isend(x, after, tag=step % 3), dist.irecv(got, before, tag=step % 3)]
    for work in works:
        work.wait()
    show("ring", got)
    operations = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    show("batch", got)
    chain = torch.zeros(SIZE)
    if rank > 0:
        dist.recv(chain, rank - 1)
    chain += x
    if rank < size - 1:
        dist.send(chain, rank + 1)
    show("chain", chain)
    early = dist.irecv(got, before, tag=9)
    show("between", summed(x))
    dist.send(x, after, tag=9)
    early.wait()
    show("early", got)


def asynchronous(step: int, x: torch.Tensor) -> None:
    tensors = [x * i for i in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    time.sleep(0.001 * (step % 2))
    for work in works:
        work.wait()
    for tensor in tensors:
        show("asynchronous", tensor)
    future = dist.all_reduce(tensors[0], async_op=True).get_future()
    future.wait()
    show("future", future.value()[0])


def collectives(step: int, x: torch.Tensor) -> None:
    parts = [torch.empty(SIZE) for _ in range(size)]
    dist.all_gather(parts, x)
    show("all_gather", torch.stack(parts))
    whole = torch.empty(SIZE * size)
    dist.all_gather_into_tensor(whole, x)
    show("all_gather_into_tensor", whole)
    tensor = x.clone()
    dist.broadcast(tensor, step % size)
    show("broadcast", tensor)
    tensor = x.clone()
    dist.reduce(tensor, step % size)
    show("reduce", tensor if rank == step % size else x)
    dist.gather(x, parts if rank == 0 else None)
    show("gather", torch.stack(parts))
    dist.scatter(tensor, [x * i for i in range(size)] if rank == 1 else None, src=1)
    show("scatter", tensor)
    dist.all_to_all_single(tensor, x)
    show("all_to_all_single", tensor)
    part = torch.empty(SIZE // size)
    dist.reduce_scatter_tensor(part, x)
    show("reduce_scatter_tensor", part)
    with dist._coalescing_manager(group=None, async_ops=True) as manager:
        tensors = [x.clone(), x * 2]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    show("coalesced", torch.stack(tensors))
    show("functional", functional.all_reduce(x, "sum", dist.group.WORLD))
    show("functional", functional.all_gather_tensor(x, 0, dist.group.WORLD))


def objects(step: int) -> None:
    found = [None] * size
    dist.all_gather_object(found, (rank, step))
    sent = [step, "x" * (step % 5)] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent, 0)
    print(found, sent)


def groups(step: int, x: torch.Tensor) -> None:
    for i, pair in enumerate(pairs):
        if rank in (i, (i + 1) % size):
            show("pair", summed(x, group=pair))
    if step % 10 == 7:
        group = dist.new_group(list(range(size)))
        show("new", summed(x, group=group))
        dist.destroy_process_group(group)
        destroyed.append(group)


def keys(step: int) -> None:
    """Rank 0 is late: the others wait for its key."""
    store.add("count", 1)
    if rank == 0:
        time.sleep(0.002)
        store.set(f"go {step}", str(step))
    print("store", store.get(f"go {step}"))
    dist.barrier()
    print("count", store.add("count", 0))
    dist.barrier()


for step in range(int(os.environ["STEPS"])):
    x = torch.randn(SIZE, generator=data)
    point_to_point(step, x)
    asynchronous(step, x)
    collectives(step, x)
    objects(step)
    groups(step, x)
    keys(step)
    dist.monitored_barrier()
dist.destroy_process_group()

"""Workers that are forked with the groups' sockets in them: they say how many internet sockets they have."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


def internet_sockets() -> int:
    inodes = set()
    for family in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{family}") as table:
            inodes |= {line.split()[9] for line in table.read().splitlines()[1:]}
    links = (
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if name.isdigit() and int(name) > 2 and os.path.lexists(f"/proc/self/fd/{name}")
    )
    return sum(link[8:-1] in inodes for link in links)


class Numbers(Dataset):
    def __len__(self) -> int:
        return 100000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(internet_sockets() if index < 8 else index)


dist.init_process_group("gloo")
assert internet_sockets() > 0
loader = iter(DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"))
x = torch.zeros(4)
for step in range(int(os.environ["STEPS"])):
    batch = next(loader).float()
    if step == 0:
        print("sockets", batch.sum().item(), flush=True)
    dist.all_reduce(batch)
    print(step, batch.sum().item().hex(), flush=True)
dist.destroy_process_group()

"""Compares each method of torch's classes with what the handles do with it; prints what was overlooked."""

import torch
import torch.distributed as dist
from stasis_trainer import handle, store, surface, versions, work
from torch._C import _distributed_c10d as c


def own(names, cls):
    return {name for name in names if name in vars(cls)}


def overlooked(base, cls, inherited):
    names = {name for name in dir(base) if name not in dir(object)}
    return sorted(names - own(names, cls) - set(inherited))


for base, cls, inherited in (
    (c.ProcessGroup, handle.HandleGroup, surface.INHERITED_GROUP),
    (c.Store, store.HandleStore, surface.INHERITED_STORE),
    (store.TCPStore, store.HandleStore, surface.INHERITED_STORE),
    (c.Work, work.HandleWork, surface.INHERITED_WORK),
    *([(c.Backend, handle.HandleBackend, surface.INHERITED_BACKEND)] if handle.backends_from_python() else []),
):
    for name in overlooked(base, cls, inherited):
        print(f"{base.__name__}.{name}")
assert dist.TCPStore is store.HandleStore
assert versions.refusal(torch.__version__) is None

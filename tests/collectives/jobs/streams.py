"""FSDP2 of torch 2.6 asks the CPU for streams, which it has not; what runs in order needs none."""

import contextlib

import torch


class Event:
    def __init__(self, *_, **__) -> None: ...
    def record(self, *_) -> None: ...
    def wait(self, *_) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Stream:
    def __init__(self, *_, **__) -> None: ...
    def record_event(self, _=None) -> Event:
        return Event()

    def wait_event(self, _) -> None: ...
    def wait_stream(self, _) -> None: ...
    def synchronize(self) -> None: ...


OLD = torch.__version__.startswith("2.6")
if OLD:
    torch.cpu.Stream, torch.cpu.Event = Stream, Event
    torch.cpu.current_stream = lambda *_: Stream()
    torch.cpu.stream = lambda _: contextlib.nullcontext()

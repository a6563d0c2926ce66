"""The GPUs of this machine, and whether anything can take their state to host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stasis.agent.cuda.hardware import MIGRATION, Hardware
from stasis.doctor.check import Check, Need
from stasis.errors import Unsupported


def checks(hardware: Hardware | None = None) -> Iterator[Check]:
    """Nothing where there is none."""
    hardware = hardware or Hardware()
    gpus = hardware.gpus()
    if not gpus and not hardware.version:
        return
    models = sorted({gpu.model for gpu in gpus})
    need = Need("GPUs", "driver", "jobs that use a GPU are refused here, by name", "", needed=False)
    found = f"{len(gpus)} of {', '.join(models) or 'no model'}, driver {hardware.version or 'none'}"
    try:
        way = hardware.driver().name
    except Unsupported as error:
        yield replace(need, remedy=error.remedy).seen(False, f"{found}: {error.message}")
        return
    finally:
        hardware.close()
    yield need.seen(True, f"{found}, by {way}")
    meaning = "a job comes back on the very GPUs that it had, and on no others"
    other = Need("GPUs", "other GPUs", meaning, f"update the driver of this node to {MIGRATION} at least", needed=False)
    yield other.seen(hardware.major >= MIGRATION, "a job may come back on others of the same model")

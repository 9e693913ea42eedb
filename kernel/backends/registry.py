"""Which backends exist, which of them can run here, and why not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from kernel.backends.base import Backend, Precision, ScaleChoice
from kernel.errors import BackendUnavailableError, InvalidArgumentError


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run on this machine."""

    name: str
    usable: bool
    reason: str
    """Why it can or cannot run, in a sentence."""


@dataclass(frozen=True)
class _Entry:
    module: str
    automatic: bool
    """Whether ``auto`` may pick it."""
    suffix: str = ""
    """Of the names of its functions, where a module has two backends."""


# Best first. A backend's module is imported only when it is asked about, so a missing package breaks nothing;
# each has `probe() -> tuple[bool, str]` and `create(device, precision) -> Backend`.
_BACKENDS = {
    "flydsl": _Entry("kernel.backends.flydsl", automatic=True),
    "triton": _Entry("kernel.backends.triton", automatic=True),
    "cpu": _Entry("kernel.backends.cpu", automatic=True),
    "reference": _Entry("kernel.backends.reference", automatic=False),
    "flydsl-sim": _Entry("kernel.backends.flydsl", automatic=False, suffix="_simulated"),
}
BACKEND_NAMES = tuple(_BACKENDS)
CHOOSING_BACKENDS = ("cpu", "reference")
"""Backends whose insert can choose a group's scale."""


def status(name: str) -> BackendStatus:
    """Whether the named backend can run here."""
    probe = cast("Callable[[], tuple[bool, str]]", _load(name, "probe"))
    usable, reason = probe()
    return BackendStatus(name, usable, reason)


def statuses() -> list[BackendStatus]:
    """Every backend, best first."""
    return [status(name) for name in _BACKENDS]


def resolve(name: str) -> str:
    """The backend that ``name`` means here: ``auto`` is the best usable one.

    Raises:
        InvalidArgumentError: no such backend.
        BackendUnavailableError: it cannot run here; says why and which ones can.
    """
    if name == "auto":
        return next(found for found, entry in _BACKENDS.items() if entry.automatic and status(found).usable)
    found = status(name)
    if not found.usable:
        raise BackendUnavailableError(name, found.reason, tuple(s.name for s in statuses() if s.usable))
    return name


def create(
    name: str = "auto",
    device: str | torch.device | None = None,
    precision: Precision = "exact",
    scale_choice: ScaleChoice = "six",
) -> Backend:
    """Make a backend.

    Args:
        name: a backend's name or ``auto``.
        device: a torch device the backend can use; its default device when None.
        precision: see :data:`kernel.backends.base.Precision`.
        scale_choice: see :data:`kernel.backends.base.ScaleChoice`; some backends have only ``six``.

    Raises:
        InvalidArgumentError: no such backend, device, precision or scale choice.
        BackendUnavailableError: it cannot run here.
    """
    chosen = resolve(name)
    if scale_choice == "six":
        make = cast("Callable[[str | None, Precision], Backend]", _load(chosen, "create"))
        return make(device_name(device), precision)
    if chosen not in CHOOSING_BACKENDS:
        raise InvalidArgumentError(
            "scale_choice",
            repr(scale_choice),
            f"backend {chosen} writes keys with amax/6 only",
            f"use six, or backend {' or '.join(CHOOSING_BACKENDS)}",
        )
    choosing = cast("Callable[[str | None, Precision, ScaleChoice], Backend]", _load(chosen, "create"))
    return choosing(device_name(device), precision, scale_choice)


def device_name(device: str | torch.device | None) -> str | None:
    """The name of a device, ``cpu`` for ``cpu:0`` too; None stays None.

    Raises:
        InvalidArgumentError: it is no device.
    """
    if device is None:
        return None
    try:
        parsed = torch.device(device) if isinstance(device, (str, torch.device)) else None
    except RuntimeError:
        parsed = None
    if parsed is None:
        raise InvalidArgumentError(
            "device",
            repr(device),
            "must be a torch device, its name or None",
            "write it as 'cpu' or 'cuda:0'",
        )
    return "cpu" if str(parsed) == "cpu:0" else str(parsed)


def _load(name: str, attribute: str) -> object:
    if name not in _BACKENDS:
        raise InvalidArgumentError(
            "backend", repr(name), "no such backend", f"use one of auto, {', '.join(_BACKENDS)}"
        )
    entry = _BACKENDS[name]
    return getattr(importlib.import_module(entry.module), attribute + entry.suffix)

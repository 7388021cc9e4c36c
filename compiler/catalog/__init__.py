"""Devices and model shapes by name, so that planning needs neither weights nor a network."""

from compiler.catalog.devices import DEVICES, DeviceEntry, device
from compiler.catalog.models import PREFIX, model_names, model_shape

__all__ = ["DEVICES", "PREFIX", "DeviceEntry", "device", "model_names", "model_shape"]

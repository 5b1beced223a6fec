"""Backends of `DeviceGroup`: one file per method of moving tensors, all with the interface in `base`."""

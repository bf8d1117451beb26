"""Imported first, makes this process a host of a pretended slice (`pjrt_slice.cpp`), whose variables are set."""

import os

import torch_xla.runtime as xr
from torch_xla.experimental import plugins


class SlicePlugin(plugins.DevicePlugin):
    """The devices of all hosts, of which those of this one are addressable."""

    def library_path(self):
        return os.environ["SLICE_SHIM"]

    def host_index(self):
        return int(os.environ["SLICE_HOST"])


# For torch_xla, the kind of the device is what comes before the underscore.
os.environ["PJRT_DEVICE"] = "CPU_SLICE"
plugins.use_dynamic_plugins()
plugins.register_plugin("CPU_SLICE", SlicePlugin())
xr.use_spmd()
xr.global_runtime_device_count()
# As for any run on XLA of the host.
os.environ["PJRT_DEVICE"] = "CPU"

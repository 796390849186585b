"""Everything that runs on Megatron-core. Importing this room on a machine without CUDA first re-targets megatron.core."""

from megarl import cpu

cpu.enter_megatron()

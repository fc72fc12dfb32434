"""GPU kernels behind the same functions: rpc and masked attention, each with its plain twin; `use` chooses."""

from vitruvius.attention.fused._switch import Mode, can_run, use, wanted

__all__ = ["Mode", "can_run", "use", "wanted"]

"""FSDP2 at an opt level: the fp32 shards are the masters, and FSDP casts the weights as it gathers them.

A half copy of the shards, as `cast_module` makes of whole weights, was tried and dropped: FSDP sizes its buffers by the
first dtype it gathers, so that such a model can never be fp32 again, and it refuses a group of which BatchNorm stays in
fp32. With a policy no half copy is kept at all: 4 bytes a weight instead of 6, over all processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_apex.casting import has_running_statistics, needs_fp32
from lightning_apex.levels import OptLevel, OptLevelError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["check_level", "check_shards", "fully_shard", "reshard"]


def check_level(level: OptLevel) -> None:
    """Refuses a level without fp32 weights.

    Raises:
        OptLevelError: If the level has half weights without masters.
    """
    if level.casts_weights and not level.master_weights:
        raise OptLevelError(
            f"opt_level={level.name!r} without master weights does not work with FSDP2, which keeps its shards in "
            "float32 for the optimizer: use 'O5', 'O2', or one of 'O0', 'O1' and 'O4'."
        )


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    level: OptLevel,
    keep_fp32: Collection[type] = (),
    reduce_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Any:
    """Torch's ``fully_shard`` with what a level computes in; modules that stay in fp32 get a group of their own.

    Modules that are spread already stay as they are.

    Args:
        module: See ``torch.distributed.fsdp.fully_shard``; called from the inside outwards, too.
        level: The level as it runs on the device.
        keep_fp32: Classes that stay in fp32.
        reduce_dtype: What gradients are averaged in; ``None`` for the dtype they are computed in.
        **kwargs: For ``torch.distributed.fsdp.fully_shard``.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torchs

    shard: Any = torchs  # one module or several, which its overloads keep apart
    modules = [module] if isinstance(module, nn.Module) else list(module)
    if "mp_policy" in kwargs:
        raise ValueError(
            f"mp_policy={kwargs['mp_policy']!r} is what opt_level={level.name!r} decides: leave it out, give "
            "reduce_dtype for the exchange of gradients, or call torch.distributed.fsdp.fully_shard yourself."
        )
    check_level(level)
    if all(isinstance(m, FSDPModule) for m in modules):
        return module
    fp32 = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    if not level.casts_weights:
        return shard(module, mp_policy=fp32, **kwargs)
    apart = [m for root in modules for m in _outermost(root, level, tuple(keep_fp32))]
    if apart:
        shard(apart if len(apart) > 1 else apart[0], mp_policy=fp32, **kwargs)
    if apart == modules:
        return module
    # autocast casts what the operators are given, and losses stay in fp32
    half = MixedPrecisionPolicy(level.half_dtype, reduce_dtype, cast_forward_inputs=False)
    return shard(module, mp_policy=half, **kwargs)


def _outermost(module: nn.Module, level: OptLevel, classes: tuple[type, ...]) -> list[nn.Module]:
    """The modules within one that stay in fp32, and have parameters that nobody has sharded yet."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        return []
    if isinstance(module, classes) or needs_fp32(module) or (level.keep_batchnorm_fp32 and _is_norm(module)):
        return [module] if any(True for _ in module.parameters()) else []
    found = [m for child in module.children() for m in _outermost(child, level, classes)]
    return list(dict.fromkeys(found))


def _is_norm(module: nn.Module) -> bool:
    return has_running_statistics(module) and not any(True for _ in module.children())


def reshard(root: nn.Module) -> None:
    """Puts the shards back: FSDP leaves the outermost weights gathered after a forward pass without a backward pass.

    An optimizer made of such a model would train weights that are thrown away.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_shards(root: nn.Module, level: OptLevel, kept: Collection[nn.Module]) -> None:
    """Refuses a model of which FSDP would compute a part in another dtype than the level says.

    Args:
        root: The model, sharded by now.
        level: The level as it runs on the device.
        kept: Modules that stay in fp32.

    Raises:
        OptLevelError: Naming the parameter, and how its module is sharded for the level.
    """
    policies = _param_dtypes(root)
    norms = [m for m in root.modules() if level.keep_batchnorm_fp32 and _is_norm(m)]
    stay = {p for m in (*kept, *norms) for p in m.parameters()}
    for name, param in root.named_parameters():
        if not param.requires_grad or param.dtype is not torch.float32:
            continue
        wanted = level.half_dtype if level.casts_weights and param not in stay else torch.float32
        actual = policies.get(param, torch.float32)
        if wanted is not None and actual is not wanted:
            raise OptLevelError(_mismatch(name, level, actual, wanted, param in policies))


def _param_dtypes(root: nn.Module) -> dict[Tensor, torch.dtype]:
    """What FSDP gathers each parameter in."""
    from torch.distributed.fsdp import FSDPModule

    dtypes: dict[Tensor, torch.dtype] = {}
    for module in reversed(list(root.modules())):  # inner groups have taken their parameters before outer ones
        if isinstance(module, FSDPModule):
            # There is no public way to ask for a policy.
            policy: MixedPrecisionPolicy = module._get_fsdp_state()._mp_policy
            for param in module.parameters():
                dtypes.setdefault(param, policy.param_dtype or torch.float32)
    return dtypes


def _mismatch(name: str, level: OptLevel, actual: torch.dtype, wanted: torch.dtype, sharded: bool) -> str:
    start = f"Parameter {name!r} would be computed in {actual} instead of {wanted} at opt_level={level.name!r}: "
    if not level.casts_weights:
        return start + "leave mp_policy out of torch's fully_shard, or use 'O5', which computes with half weights."
    if wanted is torch.float32:
        return start + "shard its module, which stays in fp32, with torch's fully_shard before the modules around it."
    how = "instead of torch's fully_shard" if sharded else "too"
    return start + f"shard its module with plugin.fully_shard(module, mesh=...) {how}, or use 'O1' or 'O4'."

"""Casts of networks that leave BatchNorm in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from lightning_apex.casting import cast_tree, has_running_statistics, own_tensors
from lightning_apex.masters import set_data


class tofp16(nn.Module):
    """Casts the floating-point tensors of its input to a half type, in whatever containers they come.

    Args:
        dtype: The half type.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, input: Any) -> Any:
        """Returns the input, cast."""
        return cast_tree(input, self.dtype)

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return str(self.dtype)


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters and buffers that a module holds itself, not those of its submodules.

    Parameters keep their identity, so an optimizer built before still knows them; gradients are cast with them.

    Args:
        module: Cast in place.
        dtype: A floating-point type.
    """
    for _, tensor in own_tensors(module):
        if tensor.is_floating_point() and tensor.dtype is not dtype:
            set_data(tensor, tensor.data.to(dtype))


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts a network, but for modules with running statistics (BatchNorm, with or without weights) and losses.

    Args:
        network: Cast in place.
        dtype: A floating-point type.

    Returns:
        The network.
    """
    for module in network.modules():
        if has_running_statistics(module) or isinstance(module, _Loss):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Casts every module with running statistics in ``module`` to fp32, in place, and returns ``module``."""
    for child in module.modules():
        if has_running_statistics(child):
            convert_module(child, torch.float32)
    return module


def network_to_half(network: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Casts a network in place, but for its BatchNorms, and puts a cast of the input in front of it.

    BatchNorm keeps its fp32 values to the last bit.

    Args:
        network: An fp32 network that takes one input.
        dtype: The half type; ``torch.bfloat16`` is the faster one on a CPU.

    Returns:
        ``nn.Sequential(tofp16(dtype), network)``.
    """
    return nn.Sequential(tofp16(dtype), convert_network(network, dtype))


class FP16Model(nn.Module):
    """A network cast like `network_to_half`, which takes any number of positional and keyword inputs.

    Args:
        network: An fp32 network, cast in place.
        dtype: The half type.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.network = convert_network(network, dtype)
        self.dtype = dtype

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Casts the inputs and calls the network."""
        return self.network(*cast_tree(inputs, self.dtype), **cast_tree(kwargs, self.dtype))

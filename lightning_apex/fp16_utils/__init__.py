"""Half networks with fp32 masters, by hand: what Apex offered before `amp`, on this package's masters and loss scaler.

New code is better served by `lightning_apex.amp` or `ApexPrecision`, which keep fp32 values from before the cast.
"""

from lightning_apex.fp16_utils.networks import (
    BN_convert_float,
    FP16Model,
    convert_module,
    convert_network,
    network_to_half,
    tofp16,
)
from lightning_apex.fp16_utils.optimizer import FP16_Optimizer
from lightning_apex.fp16_utils.param_lists import (
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
    to_python_float,
)
from lightning_apex.fp16_utils.scalers import DynamicLossScaler, LossScaler

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

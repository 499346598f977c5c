"""The functional API that Apex users know, for training loops without Lightning.

.. code-block:: python

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    ...
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""

from lightning_apex.amp.forward import disable_casts
from lightning_apex.amp.frontend import (
    autocast,
    hold_schedulers,
    initialize,
    load_state_dict,
    master_params,
    scale_loss,
    state_dict,
)
from lightning_apex.amp.functions import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = [
    "autocast",
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "half_function",
    "hold_schedulers",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

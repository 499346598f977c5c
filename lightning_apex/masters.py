"""The fp32 value of each half tensor of a cast module, and the fp32 face such a module shows to checkpoints."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_apex import ops
from lightning_apex.casting import HALF, castable_tensors, own_tensors


class MasterWeights:
    """Maps half parameters and buffers to their fp32 masters.

    A master counts only where its half tensor equals it, rounded. Elsewhere somebody wrote to the model (an
    exponential average, a user, a loaded state), and the model's value becomes the master: `reconcile`.
    """

    def __init__(self) -> None:
        self._of: dict[Tensor, Tensor] = {}
        self.version = 0  # goes up when a half tensor gets another master

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._of

    def put(self, half: Tensor, master: Tensor) -> None:
        """Makes ``master`` (fp32, same shape) the master of ``half``."""
        self._of[half] = master
        self.version += 1

    def of(self, half: Tensor) -> Tensor:
        """The master of a half tensor, on the tensor's device; made on demand from the half value."""
        master = self._of.get(half)
        if master is None:
            master = half.detach().float()
            self.put(half, master)
        elif master.device != half.device:
            master.data = master.data.to(half.device)
        return master

    def get(self, half: Tensor) -> Tensor | None:
        """The reconciled master of a half tensor, or ``None`` where it has none."""
        if half not in self._of:
            return None
        self.reconcile([half])
        return self._of[half]

    def reconcile(self, halves: Sequence[Tensor]) -> None:
        """Takes values written to the model since the last step over into the masters of these tensors."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for half in halves:
            by_device.setdefault(half.device, []).append(half)
        with torch.no_grad():
            for group in by_device.values():
                ops.reconcile_masters_([self.of(half) for half in group], [half.detach() for half in group])

    def write(self, halves: Sequence[Tensor]) -> None:
        """Rounds masters into their half tensors."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for half in halves:
            by_device.setdefault(half.device, []).append(half)
        with torch.no_grad():
            for group in by_device.values():
                ops.copy_scaled_([half.detach() for half in group], [self.of(half) for half in group])

    def clear(self) -> None:
        """Forgets all masters: the half values are all there is from now on."""
        self._of.clear()
        self.version += 1

    @contextmanager
    def swapped_into(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the masters stand in for half parameters in an optimizer's groups and state.

        Their ``grad`` is the parameter's, in fp32. On the way out the updated masters are rounded into the parameters.
        For optimizers that know nothing of masters; whatever happens inside, the groups are as before afterwards.
        """
        pairs = [(p, self.of(p)) for group in optimizer.param_groups for p in group["params"] if p.dtype in HALF]
        self.reconcile([param for param, _ in pairs])
        stand_in = dict(pairs)
        versions = [param._version for param, _ in pairs]
        for param, master in pairs:
            _widen(optimizer.state.get(param, {}), param)
            master.requires_grad_(param.requires_grad)
            master.grad = None if param.grad is None else param.grad.float()
        _replace(optimizer, stand_in)
        try:
            yield
        finally:
            _replace(optimizer, {master: param for param, master in pairs})
            for _, master in pairs:
                master.grad = None
                master.requires_grad_(False)
            bypassed = any(p._version != version for (p, _), version in zip(pairs, versions, strict=True))
            if not bypassed:
                self.write([param for param, _ in pairs])
        if bypassed:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() updated half parameters that its param_groups did not hold, past "
                "their fp32 masters: let an optimizer that wraps another share its param_groups, or use O1 or O4."
            )


def _widen(state: dict[str, Any], half: Tensor) -> None:
    """Makes fp32 of state that an optimizer created in its constructor, like its half parameter."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype in HALF and value.shape == half.shape:
            state[name] = value.float()


def _replace(optimizer: Optimizer, stand_in: dict[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [stand_in.get(p, p) for p in group["params"]]
    for old, new in stand_in.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


class CastModule:
    """A module whose weights are half for as long as this object says so.

    Casting happens in place: every Parameter keeps its identity, its fp32 storage lives on as the master, and the half
    copy is new memory. ``state_dict`` and ``load_state_dict`` of the module and of each submodule speak fp32 all the
    while. `restore` undoes everything.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype, keep: Iterable[nn.Module], keep_batchnorm: bool) -> None:
        """Casts the fp32 parameters and buffers of ``root`` to ``dtype``; fp64, integer and complex ones stay."""
        self.masters = MasterWeights()
        self.dtype = dtype
        self._faces: list[tuple[nn.Module, _FP32Face]] = []
        self._handles: list[RemovableHandle] = []
        for module, names in castable_tensors(root, keep, keep_batchnorm):
            face = _FP32Face(names, self.masters)
            for name in names:
                tensor = getattr(module, name)
                if tensor not in self.masters:  # tied weights are met again
                    master = tensor.data  # not detach(): writing a master must not look like writing its parameter
                    set_data(tensor, master.to(dtype))
                    self.masters.put(tensor, master)
                face.pairs[name] = (tensor, self.masters.of(tensor))
            self._faces.append((module, face))
            self._handles.append(save := module.register_state_dict_post_hook(_SaveHook(face)))
            # Before the user's own hooks, which may rename keys.
            cast("OrderedDict[int, Any]", module._state_dict_hooks).move_to_end(save.id, last=False)
            self._handles.append(module.register_load_state_dict_pre_hook(_LoadHook(face)))

    def halves(self) -> list[Tensor]:
        """The cast parameters and buffers, each once."""
        return list({t: None for module, face in self._faces for t in face.tensors(module)})

    def fp32_view(self, root: nn.Module) -> FP32View:
        """The module's tensors with their fp32 values, for code that averages or exchanges weights."""
        self.masters.reconcile([half for half in self.halves() if half in self.masters])
        return FP32View(root, self.masters)

    def broadcast_masters(self) -> None:
        """Gives all ranks of the default process group rank 0's fp32 values.

        DDP has broadcast the half values by then; what they round away would differ between ranks for ever.
        """
        for half in self.halves():
            if half in self.masters:
                value = self.masters.of(half).contiguous()
                torch.distributed.broadcast(value, src=0)
                self.masters.of(half).copy_(value)

    def drop_masters(self) -> None:
        """Frees the fp32 values, for training without masters."""
        self.masters.clear()
        for _, face in self._faces:
            face.pairs.clear()

    def restore(self) -> None:
        """Puts fp32 values back into the module and removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, face in self._faces:
            for tensor in face.tensors(module):
                master = self.masters.get(tensor)
                set_data(tensor, tensor.data.float() if master is None else master)
        self._faces.clear()
        self.masters.clear()


class FP32View:
    """Stands in for a cast module where only ``parameters()`` and ``buffers()`` are used; see `commit`."""

    def __init__(self, root: nn.Module, masters: MasterWeights) -> None:
        self._masters = masters
        self._parameters = {p: self._wide(p) for p in root.parameters()}
        self._buffers = {b: self._wide(b) for b in root.buffers()}

    def _wide(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in HALF:
            return tensor
        return self._masters.of(tensor) if tensor in self._masters else tensor.detach().float()

    def parameters(self) -> Iterator[Tensor]:
        """The module's parameters; half ones as their masters."""
        return iter(self._parameters.values())

    def buffers(self) -> Iterator[Tensor]:
        """The module's buffers; half ones as their masters."""
        return iter(self._buffers.values())

    def commit(self) -> None:
        """Rounds what was written to the view into the module."""
        for tensor, wide in (*self._parameters.items(), *self._buffers.items()):
            if wide is not tensor:
                tensor.data.copy_(wide)


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Gives a parameter or buffer other memory of another dtype; its gradient follows in dtype."""
    grad, tensor.grad = (tensor.grad, None) if tensor.is_leaf else (None, None)
    tensor.data = data
    if not tensor.requires_grad:
        return
    match_grad_dtype(tensor)
    if grad is not None:
        tensor.grad = grad.to(data.dtype)


def match_grad_dtype(tensor: Tensor) -> None:
    """Makes a leaf accumulate gradients of its own dtype, whatever was asked of it before."""
    if tensor.grad_dtype is not tensor.dtype:
        tensor.grad_dtype = tensor.dtype


class _FP32Face:
    """The fp32 values behind the half tensors that one module owns, by name; copies own their values."""

    def __init__(self, names: list[str], all_masters: MasterWeights) -> None:
        self.names = names
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}  # half tensor, master
        self._all_masters: weakref.ref[MasterWeights] | None = weakref.ref(all_masters)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_all_masters": None}

    def tensors(self, module: nn.Module) -> Iterator[Tensor]:
        for name, tensor in own_tensors(module):
            if name in self.names and tensor.dtype in HALF:
                yield tensor

    def master(self, module: nn.Module, name: str) -> Tensor | None:
        """The master of the tensor that has the name now; another one than at first, if weights were tied since."""
        half = getattr(module, name, None)
        if not isinstance(half, Tensor) or half.dtype not in HALF:
            return None
        first, master = self.pairs.get(name, (None, None))
        if half is first:
            return master
        everything = self._all_masters() if self._all_masters is not None else None
        return everything.get(half) if everything is not None else None

    def value(self, module: nn.Module, name: str) -> Tensor | None:
        """The fp32 value of a half tensor, after `MasterWeights.reconcile`; None if the tensor is not half."""
        half = getattr(module, name, None)
        if not isinstance(half, Tensor) or half.dtype not in HALF:
            return None
        master = self.master(module, name)
        if master is None:
            return half.detach().float()
        if master.device != half.device:
            master.data = master.data.to(half.device)
        with torch.no_grad():
            ops.reconcile_masters_([master], [half.detach()])
        return master


class _SaveHook:
    """A state-dict post-hook; a class, because module hooks are deep-copied and pickled with their module."""

    def __init__(self, face: _FP32Face) -> None:
        self.face = face

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name in self.face.names:
            key = prefix + name
            if key in state_dict and (value := self.face.value(module, name)) is not None:
                state_dict[key] = value


class _LoadHook:
    """A load-state-dict pre-hook: fp32 values reach the master before the half tensor rounds them."""

    def __init__(self, face: _FP32Face) -> None:
        self.face = face

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in self.face.names:
            value, master = state_dict.get(prefix + name), self.face.master(module, name)
            if not isinstance(value, Tensor) or master is None:
                continue
            # torch loads a tensor of one element into a 0-dim parameter
            if value.shape == master.shape or (value.numel() == 1 and master.dim() == 0):
                with torch.no_grad():
                    master.copy_(value.reshape(master.shape))

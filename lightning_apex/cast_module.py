"""A module cast to a half type in place, and the fp32 face it shows to checkpoints."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_apex import ops
from lightning_apex.casting import HALF, castable_tensors, own_tensors
from lightning_apex.masters import MasterWeights, set_data


class CastModule:
    """A module whose weights are half for as long as this object says so.

    Casting happens in place: every Parameter keeps its identity, its fp32 storage lives on as the master, and the half
    copy is new memory. ``state_dict`` and ``load_state_dict`` of the module and of each submodule speak fp32 all the
    while, also for half tensors that are moved or made meanwhile (by pruning, by a parametrization). `restore` undoes
    everything.
    """

    def __init__(
        self,
        root: nn.Module,
        dtype: torch.dtype,
        keep: Iterable[nn.Module],
        keep_batchnorm: bool,
        masters: MasterWeights | None = None,
    ) -> None:
        """Casts the fp32 parameters and buffers of ``root`` to ``dtype``; fp64, integer and complex ones stay.

        Models that train together share their ``masters``, and may share weights.
        """
        self.masters = MasterWeights() if masters is None else masters
        self.dtype = dtype
        self._root = root
        self._handles: list[RemovableHandle] = []
        # What was half before is the user's choice and stays so.
        tensors = [t for m in root.modules() for _, t in own_tensors(m)]
        self._born_half = {t: None for t in tensors if t.dtype in HALF and t not in self.masters}
        self._faces: list[_FP32Face] = []
        self._attach(root, _FP32Face(self.masters, self._born_half, recursive=True))
        for module, names in castable_tensors(root, keep, keep_batchnorm):
            face = _FP32Face(self.masters, self._born_half, recursive=False)
            for name in names:
                tensor = getattr(module, name)
                if tensor not in self.masters:  # tied weights are met again
                    master = tensor.data  # not detach(): writing a master must not look like writing its parameter
                    set_data(tensor, master.to(dtype))
                    self.masters.put(tensor, master)
                face.own[tensor] = self.masters.of(tensor)
            self._attach(module, face)

    def _attach(self, module: nn.Module, face: _FP32Face) -> None:
        self._faces.append(face)
        save = module.register_state_dict_post_hook(_SaveHook(face))
        # Before the user's own hooks, which may rename keys.
        cast("OrderedDict[int, Any]", module._state_dict_hooks).move_to_end(save.id, last=False)
        self._handles += [save, module.register_load_state_dict_pre_hook(_LoadHook(face))]

    def halves(self) -> list[Tensor]:
        """The parameters and buffers that are half because of the cast, each once."""
        tensors = {t: None for module in self._root.modules() for _, t in own_tensors(module)}
        return [t for t in tensors if t.dtype in HALF and t not in self._born_half]

    def fp32_view(self, root: nn.Module) -> FP32View:
        """The module's tensors with their fp32 values, for code that averages or exchanges weights."""
        self.masters.reconcile([half for half in self.halves() if half in self.masters])
        return FP32View(root, self.masters)

    def broadcast_masters(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Gives all ranks of a process group, or of the default one, the fp32 values of its rank 0.

        DDP has broadcast the half values by then; what they round away would differ between ranks for ever.
        """
        for half in self.halves():
            if half in self.masters:
                value = self.masters.of(half).contiguous()
                torch.distributed.broadcast(value, group=group, group_src=0)
                self.masters.of(half).copy_(value)

    def drop_masters(self) -> None:
        """Frees the fp32 values, for training without masters."""
        self.masters.clear()
        for face in self._faces:
            face.own.clear()

    def restore(self) -> None:
        """Puts fp32 values back into the module and removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # Masters too: their tensors may have left the module since.
        for tensor in dict.fromkeys((*self.halves(), *self.masters)):
            if tensor.dtype in HALF:  # else somebody made it fp32 meanwhile, and its value counts
                master = self.masters.get(tensor)
                set_data(tensor, tensor.data.float() if master is None else master)
        self._faces.clear()
        self._born_half.clear()
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


class _FP32Face:
    """The fp32 values behind a module's half tensors, found by identity whatever their names; copies own theirs."""

    def __init__(self, all_masters: MasterWeights, born_half: dict[Tensor, None], *, recursive: bool) -> None:
        self.own: dict[Tensor, Tensor] = {}  # what the module held at the cast, with its masters
        self._born_half = born_half
        self._recursive = recursive
        self._all_masters: weakref.ref[MasterWeights] | None = weakref.ref(all_masters)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_all_masters": None}

    def tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The module's half tensors and their names; those of its submodules too, if the face is recursive."""
        if self._recursive:
            found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        else:
            found = list(own_tensors(module))
        return ((name, t) for name, t in found if t.dtype in HALF and t not in self._born_half)

    def master(self, half: Tensor) -> Tensor | None:
        """A half tensor's master, on its device; not reconciled."""
        master = self.own.get(half)
        everything = self._all_masters() if self._all_masters is not None else None
        if master is None and everything is not None and half in everything:
            master = everything.of(half)
        if master is not None and master.device != half.device:
            master.data = master.data.to(half.device)
        return master

    def value(self, half: Tensor) -> Tensor:
        """The fp32 value of a half tensor, after `MasterWeights.reconcile`."""
        master = self.master(half)
        if master is None or master.shape != half.shape:
            return half.detach().float()
        with torch.no_grad():
            ops.reconcile_masters_([master], [half.detach()])
        return master


class _SaveHook:
    """A state-dict post-hook; a class, because module hooks are deep-copied and pickled with their module."""

    def __init__(self, face: _FP32Face) -> None:
        self.face = face

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name, half in self.face.tensors(module):
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and saved.dtype in HALF:
                state_dict[prefix + name] = self.face.value(half)


class _LoadHook:
    """A load-state-dict pre-hook: fp32 values reach the master before the half tensor rounds them."""

    def __init__(self, face: _FP32Face) -> None:
        self.face = face

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, half in self.face.tensors(module):
            value, master = state_dict.get(prefix + name), self.face.master(half)
            if not isinstance(value, Tensor) or master is None:
                continue
            # torch loads a tensor of one element into a 0-dim parameter
            if value.shape == master.shape or (value.numel() == 1 and master.dim() == 0):
                with torch.no_grad():
                    master.copy_(value.reshape(master.shape))


def fp32_face(hook: Any) -> _FP32Face | None:
    """The face behind a state-dict hook of a cast module or of a copy of one; ``None`` for other hooks."""
    hook = getattr(hook, "hook", hook)  # torch wraps load hooks
    return hook.face if isinstance(hook, _SaveHook | _LoadHook) else None

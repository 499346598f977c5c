"""Hooks that count the exponents of a model's weights, activations and gradients while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Any, Literal, get_args
from weakref import ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_apex.casting import has_running_statistics, map_tensors, needs_fp32, own_tensors
from lightning_apex.cli.exponents import Exponents, exponent_bins

Kind = Literal["weights", "activations", "activation_gradients", "weight_gradients"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_LEFT_OUT = (_Loss, torch.jit.ScriptModule)


@dataclass
class ModuleExponents:
    """What was counted at one module.

    Attributes:
        name: Its first name in the model; empty for the model itself.
        type: Its class.
        calls: How often it was called while the probe recorded.
        left_out: Whether its outputs are not counted: a loss module's, and a scripted one's, which take no hooks.
        stays_fp32: Whether every opt level but O3 computes with its weights in fp32.
        passes_on: Whether its outputs are those of its last submodule, as a Sequential's.
        weights: How many weights it holds, its submodules' included.
        counts: By kind. Weights are the module's own, without its submodules'; activations are its outputs.
    """

    name: str
    type: str
    calls: int = 0
    left_out: bool = False
    stays_fp32: bool = False
    passes_on: bool = False
    weights: int = 0
    counts: dict[Kind, Exponents] = field(default_factory=lambda: {kind: Exponents() for kind in KINDS})

    def gradients(self) -> Exponents:
        """Both kinds of gradients."""
        return self.counts["activation_gradients"] + self.counts["weight_gradients"]


@dataclass
class ProbeReport:
    """What an `ExponentProbe` has counted.

    Attributes:
        modules: All modules of the model by name, as in ``named_modules()``.
        forward_order: Names of those that were called, in the order in which their first calls ended.
        backward_order: Names of those that gradients reached, in the order in which these did first.
    """

    modules: dict[str, ModuleExponents]
    forward_order: list[str]
    backward_order: list[str]

    def total(self, kind: Kind, names: Sequence[str] | None = None) -> Exponents:
        """The counts of one kind of some modules; without names, of all but those that pass on what others return."""
        chosen = [n for n, m in self.modules.items() if not m.passes_on] if names is None else names
        return sum((self.modules[name].counts[kind] for name in chosen), Exponents())

    def first_out_of_range(
        self,
        kind: Literal["activations", "gradients"],
        dtype: torch.dtype = torch.float16,
        scale: float = 1.0,
        *,
        finite: bool = False,
    ) -> str | None:
        """Names the first module with a value that a type cannot hold: it overflows, or is not finite already.

        Args:
            kind: ``"activations"``, looked for in forward order, or ``"gradients"`` of either kind, in backward order.
            dtype: ``torch.float16`` or ``torch.bfloat16``.
            scale: The loss scale, a power of two, where the gradients are not scaled yet.
            finite: Leave out values that are not finite already.

        Returns:
            The name, empty for the model itself, or None.
        """
        for name in self.forward_order if kind == "activations" else self.backward_order:
            module = self.modules[name]
            counted = module.counts["activations"] if kind == "activations" else module.gradients()
            fate = counted.fate(dtype, scale)
            if fate.overflowed or (fate.nonfinite and not finite):
                return name
        return None

    @property
    def first_not_finite(self) -> str | None:
        """Names the first module that returned infinity or NaN, else the first that such gradients reached."""
        outputs = ((name, self.modules[name].counts["activations"]) for name in self.forward_order)
        gradients = ((name, self.modules[name].gradients()) for name in self.backward_order)
        return next((name for name, counted in chain(outputs, gradients) if counted.infs or counted.nans), None)

    @property
    def never_called(self) -> list[str]:
        """Names of modules that were not used: neither called, nor anything in them, nor their weights; outermost."""
        used = [n for n, m in self.modules.items() if m.calls or m.left_out or m.counts["weight_gradients"].elements]
        around = {name[:end] for name in used for end in range(len(name) + 1) if name[end : end + 1] in ("", ".")}
        unused = [name for name in self.modules if name and name not in around]
        return [name for name in unused if not any(name.startswith(f"{outer}.") for outer in unused)]


class ExponentProbe:
    """Counts exponents at every module of a model: ``with ExponentProbe(model) as probe: ...train...``.

    Everything is counted on the device of the values, in memory that does not grow with the steps. Scalars are left
    out, and so are loss modules: a loss is computed in fp32 at every opt level. A block that is computed again in the
    backward pass (checkpointing) counts once. Inside of `torch.func`'s transforms and scripted modules nothing counts.

    Args:
        root: The model.

    Attributes:
        recording: Set it to False to let steps pass uncounted.
    """

    def __init__(self, root: nn.Module) -> None:
        self.recording = True
        self._root = root
        self._names = {module: name for name, module in root.named_modules()}
        self._calls: dict[str, int] = dict.fromkeys(self._names.values(), 0)
        self._bins: dict[tuple[str, Kind], Tensor] = {}
        self._forward_order: dict[str, None] = {}
        self._backward_order: dict[str, None] = {}
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[Tensor, None] = {}
        self._last: tuple[ref[Tensor], int, Tensor] | None = None

    def __enter__(self) -> ExponentProbe:
        for module, name in self._names.items():
            if not isinstance(module, _LEFT_OUT):
                self._handles.append(module.register_forward_hook(_OutputHook(self, name)))
            self._watch_parameters(module, name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._last = None

    def count_weights(self) -> None:
        """Counts the parameters as they are now; each once, with the first module that holds it."""
        seen: set[Tensor] = set()
        for module, name in self._names.items():
            for _, tensor in own_tensors(module):
                if isinstance(tensor, nn.Parameter) and tensor not in seen and not is_lazy(tensor):
                    seen.add(tensor)
                    self._count(name, "weights", tensor)

    def report(self) -> ProbeReport:
        """What was counted so far; this waits for the device."""
        modules = {
            name: ModuleExponents(
                name,
                type(module).__name__,
                self._calls[name],
                left_out=isinstance(module, _LEFT_OUT),
                stays_fp32=has_running_statistics(module) or needs_fp32(module),
                passes_on=isinstance(module, nn.Sequential) and len(module) > 0,
                weights=sum(param.numel() for param in module.parameters() if not is_lazy(param)),
                counts={kind: Exponents(self._bins.get((name, kind))) for kind in KINDS},
            )
            for module, name in self._names.items()
        }
        return ProbeReport(modules, list(self._forward_order), list(self._backward_order))

    @_disable_dynamo
    def after_forward(self, module: nn.Module, name: str, output: Any) -> None:
        """Called by a module's hook with what the module returned."""
        if not self.recording:
            return
        again = torch._C._current_graph_task_id() != -1  # in a backward pass: a checkpointed block
        if not again:
            self._calls[name] += 1
            self._forward_order.setdefault(name)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # tensors that nothing may be added to or from
            return
        self._watch_parameters(module, name)  # unfrozen or made meanwhile
        map_tensors(output, lambda tensor: self._see_output(name, tensor, again))

    def _see_output(self, name: str, tensor: Tensor, again: bool) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        if not again:
            self._count(name, "activations", tensor)
        # A hook on a leaf would stay for ever, and a parameter has its own.
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(_GradientHook(self, name, "activation_gradients"))
        return tensor

    def _watch_parameters(self, module: nn.Module, name: str) -> None:
        for param in module._parameters.values():
            if param is not None and param.requires_grad and param not in self._hooked and not is_lazy(param):
                self._hooked[param] = None
                self._handles.append(param.register_hook(_GradientHook(self, name, "weight_gradients")))

    @_disable_dynamo
    def after_backward(self, name: str, kind: Kind, grad: Tensor) -> None:
        """Called by a tensor's hook with its gradient."""
        if self.recording:
            self._backward_order.setdefault(name)
            self._count(name, kind, grad)

    # Not inference mode's tensors: they could not be added to later.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _count(self, name: str, kind: Kind, tensor: Tensor) -> None:
        values = _dense(tensor)
        if values is None:
            return
        bins = self._bins_of(tensor, values)
        total = self._bins.get((name, kind))
        if total is None:
            self._bins[name, kind] = bins.clone()
        else:
            total += bins.to(total.device)

    def _bins_of(self, tensor: Tensor, values: Tensor) -> Tensor:
        """Counted once where a container returns what its last module did."""
        if tensor.is_inference():
            return exponent_bins(values)
        if self._last is not None and self._last[0]() is tensor and self._last[1] == tensor._version:
            return self._last[2]
        bins = exponent_bins(values)
        self._last = (ref(tensor), tensor._version, bins)
        return bins


class _OutputHook:
    """On a module. A copy of the module has a dead one: an average of weights is not the model that trains."""

    def __init__(self, probe: ExponentProbe | None, name: str) -> None:
        self._probe, self._name = probe, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._probe is not None:
            self._probe.after_forward(module, self._name, output)

    def __deepcopy__(self, memo: Any) -> _OutputHook:
        return _OutputHook(None, self._name)


class _GradientHook:
    """On a tensor; see `_OutputHook` for copies."""

    def __init__(self, probe: ExponentProbe | None, name: str, kind: Kind) -> None:
        self._probe, self._name, self._kind = probe, name, kind

    def __call__(self, grad: Tensor) -> None:
        if self._probe is not None:
            self._probe.after_backward(self._name, self._kind, grad)

    def __deepcopy__(self, memo: Any) -> _GradientHook:
        return _GradientHook(None, self._name, self._kind)


def _dense(tensor: Tensor) -> Tensor | None:
    """The values of a tensor that can be counted; None where there are none, or no floating-point ones."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    if not tensor.is_floating_point() or tensor.is_meta:
        return None
    if tensor.layout is torch.sparse_coo:
        return tensor.detach().coalesce().values()
    if tensor.is_nested or tensor.layout is not torch.strided:
        return tensor.detach().values()
    return tensor

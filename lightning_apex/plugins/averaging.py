"""Weight averaging over fp32 masters: Lightning's averaging callbacks would average and exchange rounded weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lightning_apex.cast_module import CastModule
from lightning_apex.plugins.namespace import TrainerNamespace

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule


class AveragingAdapter:
    """Shows averaging callbacks the fp32 masters of a cast module for as long as it is attached."""

    def __init__(self, module: LightningModule, cast: CastModule, lightning: TrainerNamespace) -> None:
        self._module = module
        self._cast = cast
        # The methods of a callback through which it reads or writes the model's weights.
        self._touches = {
            lightning.WeightAveraging: ("_swap_models", "_copy_average_to_current"),
            lightning.StochasticWeightAveraging: ("update_parameters", "transfer_weights"),
        }
        self._averages = lightning.WeightAveraging
        self._patched: list[tuple[Any, str]] = []

    def attach(self, callbacks: Iterable[Callback]) -> None:
        """Adapts the averaging callbacks among these."""
        for callback in callbacks:
            for kind, names in self._touches.items():
                if isinstance(callback, kind):
                    for name in names:
                        self._patch(callback, name)
            average = getattr(callback, "_average_model", None)
            if isinstance(callback, self._averages) and average is not None:
                self._patch(average, "update_parameters")

    def detach(self) -> None:
        """Leaves the callbacks as they were."""
        for target, name in self._patched:
            target.__dict__.pop(name, None)
        self._patched.clear()

    def _patch(self, target: Any, name: str) -> None:
        original = getattr(target, name)
        target.__dict__[name] = self._through_view(original)
        self._patched.append((target, name))

    def _through_view(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def with_masters(*args: Any, **kwargs: Any) -> Any:
            view = self._cast.fp32_view(self._module)
            result = method(*(view if arg is self._module else arg for arg in args), **kwargs)
            view.commit()
            return result

        return with_masters

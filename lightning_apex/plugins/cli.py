"""The body of a LightningCLI with flags of its own; see `lightning_apex.plugins.namespace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from lightning_apex.plugins.layer_sync import ApexSyncBatchNormBody
from lightning_apex.plugins.namespace import TrainerNamespace
from lightning_apex.plugins.precision import ApexPrecisionBody

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
else:
    LightningCLI = object


class ApexCLIBody(LightningCLI):
    """`LightningCLI` with two flags more: ``python main.py fit --opt_level O2 --sync_bn``.

    ``--opt_level O2`` is short for the plugin ``ApexPrecision("O2")``, ``--sync_bn`` for ``ApexSyncBatchNorm()``. Both
    may stand in a configuration file, as ``opt_level: O2`` and ``sync_bn: true``. Other arguments of these plugins are
    given as with `LightningCLI`, by ``--trainer.plugins``; a plugin given there and by a flag, too, is an error.
    """

    _lightning: TrainerNamespace
    _precision: type[ApexPrecisionBody]
    _layer_sync: type[ApexSyncBatchNormBody]

    @override
    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # Not add_arguments_to_parser, which subclasses override without calling ours.
        from jsonargparse import ActionYesNo

        super().add_default_arguments_to_parser(parser)
        parser.add_argument(
            "--opt_level",
            type=Literal["O0", "O1", "O2", "O3", "O4", "O5"] | None,  # null undoes a configuration file's
            default=None,
            metavar="{O0,O1,O2,O3,O4,O5,null}",
            help="Train at this opt level, with the plugin lightning_apex.ApexPrecision.",
        )
        parser.add_argument(
            "--sync_bn",
            action=ActionYesNo,
            nargs="?",  # --sync_bn=true, too
            default=False,
            help="Synchronise BatchNorm while fitting, with the plugin lightning_apex.ApexSyncBatchNorm.",
        )

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        opt_level, sync_bn = (self._get(self.config_init, key) for key in ("opt_level", "sync_bn"))
        if opt_level is None and not sync_bn:
            return super().instantiate_trainer(**kwargs)
        given = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        plugins = given.get("plugins")
        plugins = [] if plugins is None else list(plugins) if isinstance(plugins, list | tuple) else [plugins]
        if opt_level is not None:
            self._refuse_both(f"--opt_level={opt_level}", plugins, self._lightning.Precision)
            if given.get("precision") is not None:
                self._error(f"--opt_level={opt_level} and --trainer.precision={given['precision']} are both given")
            plugins.append(self._precision(opt_level))
        if sync_bn:
            self._refuse_both("--sync_bn", plugins, self._lightning.LayerSync)
            plugins.append(self._layer_sync())
        return super().instantiate_trainer(**{**kwargs, "plugins": plugins})

    def _refuse_both(self, flag: str, plugins: list[Any], kind: type) -> None:
        for plugin in plugins:
            if isinstance(plugin, kind):
                self._error(f"{flag} and {type(plugin).__name__} in --trainer.plugins are both given")

    def _error(self, problem: str) -> None:
        self._parser(self.subcommand).error(f"{problem}: leave one of them out.")

"""Looks names up in the table: what became of ``apex.optimizers.fused_adam.FusedAdam``?"""

from __future__ import annotations

from lightning_apex.migrate import table, table_contrib
from lightning_apex.migrate.row import Row

#: The whole table, by the headings of the page.
SECTIONS: dict[str, tuple[Row, ...]] = {
    **table.SECTIONS,
    **table_contrib.SECTIONS,
    "Lightning's own Apex plugin": table.LIGHTNING,
}

_ROOT = Row("apex", "same", "lightning_apex", note="The whole package.", module=True)
_ROWS: dict[str, Row] = {row.name: row for rows in SECTIONS.values() for row in rows} | {"apex": _ROOT}

#: Modules in which Apex defines what its packages offer.
_INSIDE = {
    "apex.amp.amp": "apex.amp",
    "apex.amp.frontend": "apex.amp",
    "apex.amp.handle": "apex.amp",
    "apex.parallel.distributed": "apex.parallel",
    "apex.parallel.sync_batchnorm": "apex.parallel",
    "apex.parallel.optimized_sync_batchnorm": "apex.parallel",
    "apex.parallel.LARC.LARC": "apex.parallel.LARC",
    "apex.fp16_utils.fp16util": "apex.fp16_utils",
    "apex.fp16_utils.fp16_optimizer": "apex.fp16_utils",
    "apex.fp16_utils.loss_scaler": "apex.fp16_utils",
    "apex.normalization.fused_layer_norm": "apex.normalization",
    "apex.mlp.mlp": "apex.mlp",
    "apex.fused_dense.fused_dense": "apex.fused_dense",
    "apex.contrib.clip_grad.clip_grad": "apex.contrib.clip_grad",
    "apex.contrib.layer_norm.layer_norm": "apex.contrib.layer_norm",
    "apex.contrib.group_norm.group_norm": "apex.contrib.group_norm",
    "apex.contrib.xentropy.softmax_xentropy": "apex.contrib.xentropy",
    "apex.contrib.groupbn.batch_norm": "apex.contrib.groupbn",
    "apex.contrib.cudnn_gbn.batch_norm": "apex.contrib.cudnn_gbn",
    "apex.contrib.sparsity.asp": "apex.contrib.sparsity",
    "apex.contrib.transducer.transducer": "apex.contrib.transducer",
    "apex.transformer.amp.grad_scaler": "apex.transformer.amp",
    "apex.transformer.functional.fused_softmax": "apex.transformer.functional",
    "apex.transformer.tensor_parallel.layers": "apex.transformer.tensor_parallel",
    "apex.transformer.tensor_parallel.random": "apex.transformer.tensor_parallel",
    "apex.transformer.tensor_parallel.cross_entropy": "apex.transformer.tensor_parallel",
    "apex.transformer.layers.layer_norm": "apex.transformer.layers",
    **{f"apex.optimizers.fused_{n}": "apex.optimizers" for n in ("adam", "sgd", "lamb", "novograd", "adagrad", "lars")},
    "apex.optimizers.fused_mixed_precision_lamb": "apex.optimizers",
    "apex.optimizers.fp16_optimizer": "apex.optimizers",
    **{
        f"lightning.pytorch.plugins.{place}": "lightning.pytorch.plugins"
        for place in ("precision", "precision.apex_amp", "precision.native_amp", "precision.amp")
    },
    **{f"lightning.pytorch.utilities.{place}": "lightning.pytorch.utilities" for place in ("enums", "imports")},
}


def rows() -> list[Row]:
    """Every row of the table."""
    return list(_ROWS.values())


def canonical(name: str) -> str:
    """The shortest way to import what ``name`` names."""
    if name.partition(".")[0] == "pytorch_lightning":
        name = "lightning.pytorch" + name.removeprefix("pytorch_lightning")
    for inside in sorted(_INSIDE, key=len, reverse=True):
        if name == inside or name.startswith(inside + "."):
            return _INSIDE[inside] + name.removeprefix(inside)
    return name


def find(name: str) -> Row | None:
    """The row that speaks for a dotted name; ``None`` for a name that Apex did not offer to its users."""
    name = canonical(name)
    path = name
    while path:
        row = _ROWS.get(path)
        if row is not None:
            fits = path == name or row.covers or not row.module  # an attribute of a class or function
            return row if fits else None
        path = path.rpartition(".")[0]
    return None


def target(name: str) -> str | None:
    """The name that takes the place of a dotted one as it stands, if any."""
    row, name = find(name), canonical(name)
    if row is None or row.to is None:
        return None
    return row.to + name.removeprefix(row.name)

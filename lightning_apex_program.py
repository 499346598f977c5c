"""Where the ``lightning-apex`` command starts.

Importing `lightning_apex` imports torch and Lightning, which takes seconds, and fails without the compiled extension,
which ``lightning-apex doctor`` must be able to say. So the program's modules are imported with a package in their place
that runs its ``__init__`` when somebody first asks it for a name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

PACKAGE = "lightning_apex"


def defer_package() -> ModuleType:
    """Puts the package in ``sys.modules``; its ``__init__`` runs when a name is first asked for."""
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    loader, module = spec.loader, importlib.util.module_from_spec(spec)

    def on_first_use(name: str) -> Any:
        if name.startswith("__") and name not in (
            "__version__",
            "__all__",
        ):  # the import machinery asks; the package has all that it needs
            raise AttributeError(name)
        import lightning_apex.cli as cli

        if name in cli.__all__:  # jsonargparse looks for the shortest way to import a command's function
            raise AttributeError(name)
        submodule = f"{PACKAGE}.{name}"
        if submodule in sys.modules or importlib.util.find_spec(submodule) is not None:
            # Running __init__ here would come back to the half-imported module that asks.
            return importlib.import_module(submodule)
        del module.__getattr__
        try:
            loader.exec_module(module)
        except BaseException:
            module.__getattr__ = on_first_use  # type: ignore[method-assign]
            raise
        return getattr(module, name)

    module.__getattr__ = on_first_use  # type: ignore[method-assign]
    sys.modules[PACKAGE] = module
    return module


def main() -> int:
    """Runs the program; returns its exit status."""
    defer_package()
    from lightning_apex.cli.program import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

"""What became of Apex in a user's sources: ``python -m lightning_apex.migrate PATH [--write] [--json]``.

The names are in `table.py` and `table_contrib.py`; the page docs/migration.md is made from them.
"""
